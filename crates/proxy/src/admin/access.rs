//! The admin page is for callers in the sidecar's own network namespace, wherever it listens. The sidecar has no keys to verify tokens
//! with, so nobody else is let in.

use std::net::IpAddr;

use axum::{
    extract::{
        Request,
        connect_info::{ConnectInfo, Connected},
    },
    http::{StatusCode, header},
    middleware::Next,
    response::{IntoResponse as _, Response},
    serve::IncomingStream,
};
use skysail_core::local::{Caller, Refusal};
use tokio::net::TcpListener;

/// The two ends of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ends {
    local: Option<IpAddr>,
    remote: IpAddr,
}

impl Connected<IncomingStream<'_, TcpListener>> for Ends {
    fn connect_info(stream: IncomingStream<'_, TcpListener>) -> Self {
        let local = stream.io().local_addr().ok().map(|address| address.ip());
        Self { local, remote: stream.remote_addr().ip() }
    }
}

/// Answers for the pages where a caller may not see them.
pub(super) async fn guard(ConnectInfo(ends): ConnectInfo<Ends>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let all = |name: header::HeaderName| headers.get_all(name).iter().map(|value| value.as_bytes()).collect();
    let mut caller = Caller {
        local: ends.local,
        remote: ends.remote,
        hosts: all(header::HOST),
        origins: all(header::ORIGIN),
        sites: all(header::HeaderName::from_static("sec-fetch-site")),
    };
    caller.hosts.extend(request.uri().authority().map(|authority| authority.as_str().as_bytes()));
    match caller.check() {
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
