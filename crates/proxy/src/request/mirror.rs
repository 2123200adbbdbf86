//! Copies of requests, sent elsewhere on the side; their answers are thrown away.
//!
//! Only requests that are held whole (up to 64 KiB of body) are copied: a copy must never hold up its original.
//! Each copy has a connection of its own, which ends with it. Source: `envoy.config.route.v3.RouteAction.RequestMirrorPolicy`.

use std::{future::poll_fn, rc::Rc, time::Duration};

use tracing::debug;

use crate::{
    call,
    upstream::{self, ApplicationProtocol, Offer},
    worker::Worker,
};
use skysail_http::{flow::Flow, head::RequestHead, http1::write::Persistence, timer};
use skysail_policy::{
    config::{Snapshot, route::Mirror},
    error::Error,
    peer::{METADATA, METADATA_ID},
    route,
};

/// How long an answer that nobody reads is waited for.
const PATIENCE: Duration = Duration::from_secs(15);

/// Sends copies of a complete request, each by its own chance.
pub(crate) fn send(
    worker: &Rc<Worker>,
    snapshot: &Snapshot,
    mirrors: &[Mirror],
    head: &RequestHead,
    body: &Flow,
) {
    for mirror in mirrors {
        if !body.is_whole() || !route::roll(&mut worker.dice.borrow_mut(), mirror.fraction) {
            continue;
        }
        let Some(pool) = worker.pool(&mirror.cluster, snapshot) else {
            debug!("no cluster {} for copies of requests", mirror.cluster);
            continue;
        };
        let (host, busy) = match call::place(worker, &pool) {
            Ok(place) => place,
            Err(error) => {
                debug!("no copy of a request goes to {}: {error}", pool.cluster.name);
                continue;
            }
        };
        let mut head = head.clone();
        head.remove(METADATA);
        head.remove(METADATA_ID);
        if !mirror.keep_host {
            head.set_authority(&shadow(head.authority()));
        }
        let (framing, content) = (body.framing(), body.kept().unwrap_or_default().to_vec());
        let (trailers, worker) = (body.trailers().cloned(), worker.clone());
        tokio::task::spawn_local(async move {
            let _busy = busy;
            let sent = async {
                let offer = Offer::http(&pool.cluster, &head, true);
                // Requests of HTTP/2 need no connection of their own.
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
            if let Some(Err(error)) = timer::timeout(PATIENCE, sent).await {
                debug!("a copy of a request did not get to {}: {error}", pool.cluster.name);
            }
        });
    }
}

/// `reviews:9080` is mirrored as `reviews-shadow:9080`.
fn shadow(authority: &str) -> String {
    let host = route::without_port(authority);
    format!("{host}-shadow{}", &authority[host.len()..])
}
