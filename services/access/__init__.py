"""API keys, and the tenants behind them."""
