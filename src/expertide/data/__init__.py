"""The demo model, shipped inside the package so that `expertide run demo` works offline. Made by demo_model/."""
