//! HTTP on a downstream connection: detects the version and reads the requests.

pub(crate) mod h2c;
pub(crate) mod http1;
pub(crate) mod http2;
mod refuse;

use std::{rc::Rc, sync::Arc};

use crate::worker::{
    Worker,
    downstream::{Accepted, Origin},
};
use skysail_policy::config::{HttpManager, http::Codec, listener::Terminal};

/// Serves a connection until it ends.
pub(crate) async fn run(worker: &Rc<Worker>, connection: Box<Accepted>, manager: Arc<HttpManager>) {
    let counters = worker.shard.manager(&manager.stat_prefix);
    counters.cx_total.inc();
    counters.cx_active.inc();
    let negotiated = connection.stream.alpn().map(|protocol| protocol.ends_with(b"h2"));
    let known = match manager.codec {
        Codec::Auto => negotiated,
        Codec::Http1 => Some(false),
        Codec::Http2 => Some(true),
    };
    // The futures are boxed, because they are much larger than the task of a connection that waits for its
    // first byte.
    let http2 = match known {
        Some(true) => Some((connection, None)),
        Some(false) => Box::pin(http1::run(worker, connection, &manager, false)).await,
        None => Box::pin(http1::run(worker, connection, &manager, true)).await,
    };
    if let Some((connection, begun)) = http2 {
        Box::pin(http2::run(worker, *connection, &manager, begun)).await;
    }
    counters.cx_active.dec();
}

/// Returns the newest connection manager of the filter chain, if it differs from this one.
fn newest(origin: &Origin, manager: &Arc<HttpManager>) -> Option<Arc<HttpManager>> {
    match &origin.chain.terminal {
        Terminal::Http(newest) if !Arc::ptr_eq(newest, manager) => Some(newest.clone()),
        _ => None,
    }
}
