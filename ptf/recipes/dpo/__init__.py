"""Learning from preferences: DPO, IPO and SimPO."""
