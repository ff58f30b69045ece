"""What a person or a probe may ask over HTTP: is it alive, and how does it stand?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Response

from strata._version import __version__

if TYPE_CHECKING:
    from strata.coordinator.engine import Engine
    from strata.coordinator.session import SessionHub


def make_app(engine: Engine, hub: SessionHub) -> FastAPI:
    app = FastAPI(title="Strata coordinator", version=__version__, docs_url=None, redoc_url=None)

    @app.get("/api/health")
    async def health(response: Response) -> dict[str, Any]:
        """200 while calls are carried out; 503 with the reason while the journal cannot be written."""
        if engine.failure is not None:
            response.status_code = 503
            return {"status": "refusing", "reason": engine.failure.message}
        return {"status": "ok"}

    @app.get("/api/status")
    async def status() -> dict[str, Any]:
        return {
            "version": __version__,
            "num_sessions": hub.num_sessions,
            "journal_bytes": engine.journal.size_bytes(),
            "journal_damage": engine.damage.reason if engine.damage else None,
            "jobs": [
                {
                    "job_id": job.job_id,
                    "generation": job.announced[0],
                    "num_workers": job.announced[1],
                    "num_datasets": len(job.shards.datasets),
                    "num_open_barriers": len(job.barriers.open),
                }
                for job in engine.core.jobs.values()
            ],
        }

    return app
