//! The admin page is for callers in the sidecar's own network namespace, wherever it listens. The sidecar has no keys to verify tokens
//! with, so nobody else is let in.

use axum::{
    extract::{ConnectInfo, Request},
    http::StatusCode,
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use skysail_admin::Ends;
use skysail_core::local::Refusal;

/// Answers for the pages where a caller may not see them.
pub(super) async fn guard(ConnectInfo(ends): ConnectInfo<Ends>, request: Request, next: Next) -> Response {
    match ends.check(&request) {
        Ok(()) => next.run(request).await,
        Err(refusal) => {
            let hint = match refusal {
                Refusal::Elsewhere => {
                    "; ask from there or by port forwarding. /ready, /healthz/ready and /stats/prometheus are open"
                }
                Refusal::Host | Refusal::CrossSite => "",
            };
            (StatusCode::FORBIDDEN, format!("{refusal}{hint}\n")).into_response()
        }
    }
}
