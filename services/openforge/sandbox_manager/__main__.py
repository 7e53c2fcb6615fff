from openforge.sandbox_manager.serve import serve
from openforge.sandbox_manager.settings import Settings
from openforge.service import run_service

run_service("sandbox_manager", Settings, serve)
