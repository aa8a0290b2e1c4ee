"""Plans of models with latent attention, experts and multi-token prediction, and other schedules at equal memory."""
