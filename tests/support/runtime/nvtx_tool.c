/* What a profiler is to NVTX: a library that NVTX loads and calls back. This one prints the ranges. */
#include <nvtx3/nvToolsExt.h>
#include <stdio.h>

static int NVTX_API push(const char *name) {
    printf("push %s\n", name);
    fflush(stdout);
    return 0;
}

static int NVTX_API pop(void) {
    printf("pop\n");
    fflush(stdout);
    return 0;
}

__attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
    const NvtxExportTableCallbacks *callbacks = get_table(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable table;
    unsigned int size = 0;
    if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size)) return 0;
    *table[NVTX_CBID_CORE_RangePushA] = (NvtxFunctionPointer)push;
    *table[NVTX_CBID_CORE_RangePop] = (NvtxFunctionPointer)pop;
    return 1;
}
