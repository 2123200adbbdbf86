//! Request mirroring: sends copies of requests to other clusters, and discards the responses.
//!
//! Only requests whose whole body is buffered (up to 64 KiB) are copied, so that a copy never delays the original. An
//! HTTP/1.1 copy uses a new connection, which ends with it. Source:
//! `envoy.config.route.v3.RouteAction.RequestMirrorPolicy`.

use std::{future::poll_fn, rc::Rc, time::Duration};

use tracing::debug;

use crate::{
    call,
    upstream::{self, AlpnOffer, ApplicationProtocol},
    worker::Worker,
};
use skysail_http::{flow::Flow, head::RequestHead, http1::write::Persistence, timer};
use skysail_policy::{
    config::{Snapshot, route::Mirror},
    error::Error,
    peer::{METADATA, METADATA_ID},
    route,
};

/// Time limit of a copy, up to the end of its response.
const TIMEOUT: Duration = Duration::from_secs(15);

/// Sends copies of a complete request, each with the probability of its policy.
pub(crate) fn send(
    worker: &Rc<Worker>,
    snapshot: &Snapshot,
    mirrors: &[Mirror],
    head: &RequestHead,
    body: &Flow,
) {
    for mirror in mirrors {
        if !body.is_replayable() || !route::sample(&mut worker.rng.borrow_mut(), mirror.fraction) {
            continue;
        }
        let Some(pool) = worker.pool(&mirror.cluster, snapshot) else {
            debug!("request not mirrored: no cluster {}", mirror.cluster);
            continue;
        };
        let (host, busy) = match call::select_host(worker, &pool) {
            Ok(selected) => selected,
            Err(error) => {
                debug!("request not mirrored to {}: {error}", pool.cluster.name);
                continue;
            }
        };
        let mut head = head.clone();
        head.remove(METADATA);
        head.remove(METADATA_ID);
        if !mirror.keep_host {
            head.set_authority(&shadow_authority(head.authority()));
        }
        let (framing, content) = (body.framing(), body.kept().unwrap_or_default().to_vec());
        let (trailers, worker) = (body.trailers().cloned(), worker.clone());
        tokio::task::spawn_local(async move {
            let _busy = busy;
            let sent = async {
                let offer = AlpnOffer::http(&pool.cluster, &head, true);
                // HTTP/2 copies are streams of a shared connection.
                let shared = if offer.protocol == ApplicationProtocol::Http2 {
                    upstream::take(&pool, &host, &offer)?
                } else {
                    None
                };
                let upstream = match shared {
                    Some(upstream) => upstream,
                    None => upstream::get(&pool, &host, &offer, &worker.shared.dialer, true).await?,
                };
                let mut wire = upstream.wire;
                wire.request(&head, framing, Persistence::Close)?;
                let mut body = Flow::whole(&content, framing, trailers);
                if poll_fn(|cx| body.poll_send(cx, &mut wire)).await.is_ok() {
                    poll_fn(|cx| wire.poll_ignored(cx)).await;
                }
                Ok::<_, Error>(())
            };
            if let Some(Err(error)) = timer::timeout(TIMEOUT, sent).await {
                debug!("request not mirrored to {}: {error}", pool.cluster.name);
            }
        });
    }
}

/// Returns the authority of a copy: `reviews-shadow:9080` for `reviews:9080`.
fn shadow_authority(authority: &str) -> String {
    let host = route::without_port(authority);
    format!("{host}-shadow{}", &authority[host.len()..])
}
