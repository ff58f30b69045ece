"""The routes of the dashboard: models, login, static files. Imported when HTTP is served, for it needs FastAPI."""
