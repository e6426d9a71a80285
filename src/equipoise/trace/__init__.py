"""`equipoise trace`: the expert load of any MoE model of transformers, and what balancing would gain."""
