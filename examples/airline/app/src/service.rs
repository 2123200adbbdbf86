//! Code shared by all services: graceful shutdown, health, and error responses.

use axum::{
    Json, Router,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::get,
};
use tokio::net::TcpListener;

/// An error response: the status and one sentence.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: StatusCode,
    why: String,
}

impl Failure {
    pub(crate) fn new(status: StatusCode, why: impl Into<String>) -> Self {
        Self { status, why: why.into() }
    }

    pub(crate) fn not_found(why: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, why)
    }

    pub(crate) fn internal(why: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, why)
    }

    pub(crate) fn bad_request(why: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, why)
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.why)
    }
}

impl std::error::Error for Failure {}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        (self.status, Json(serde_json::json!({ "error": self.why }))).into_response()
    }
}

/// Serves the routes and `/healthz` until SIGTERM or SIGINT. Active requests are completed.
pub(crate) async fn serve(listener: TcpListener, router: Router) -> anyhow::Result<()> {
    let router = router.route("/healthz", get(async || "ok\n"));
    let end = async {
        if let Err(error) = skysail_core::shutdown::terminate().await {
            tracing::error!(%error, "cannot listen for signals; only SIGKILL ends this process");
            std::future::pending::<()>().await;
        }
    };
    Ok(axum::serve(listener, router).with_graceful_shutdown(end).await?)
}
