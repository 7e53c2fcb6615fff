"""The names that ClawEval's graders import, with nothing behind them but Python's own library."""
