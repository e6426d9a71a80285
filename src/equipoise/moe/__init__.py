"""Router, experts, MoE layer, auxiliary losses and the selection bias."""
