//! Access check of the admin pages that are not open to the network. They serve only callers in the sidecar's own
//! network namespace, whatever address the server listens on. The sidecar has no keys to verify tokens, so it refuses
//! all other callers.

use axum::{
    extract::{ConnectInfo, Request},
    http::StatusCode,
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use skysail_admin::ConnectionAddresses;
use skysail_core::local::Refusal;

/// Refuses requests for pages that the caller is not allowed to see.
pub(super) async fn guard(
    ConnectInfo(ends): ConnectInfo<ConnectionAddresses>,
    request: Request,
    next: Next,
) -> Response {
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
