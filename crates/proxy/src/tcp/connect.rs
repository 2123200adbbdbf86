//! Connections of the TCP proxy to endpoints, and tunnels through HTTP proxies (`tunneling_config`): CONNECT, RFC 9110
//! section 9.3.6, or the bodies of a POST and its response, over HTTP/1.1.

use std::{future::poll_fn, rc::Rc};

use skysail_http::{
    head::ResponseHead,
    http1::{Framing, HeadLimits, Scan},
    socket::Stream,
    timer::timeout,
    wire::Wire,
};
use skysail_policy::{
    balance::{self, PickOptions},
    config::{
        listener::{TcpProxy, Tunneling},
        route::Targets,
    },
    error::{Error, Kind},
    outlier::UpstreamResult,
    route,
};

use super::{AttemptedEndpoint, Server, WaitingClient};
use crate::{
    upstream::{
        self, AlpnOffer, pick,
        pool::{LimitReached, Upstream},
        response::poll_head,
    },
    worker::{Worker, downstream::Origin},
};

/// Limits of the response's head, and of the trailers behind a body.
pub(super) const HEAD: HeadLimits = HeadLimits { max_head: 16 * 1024, max_headers: 100, keep_case: false };

/// Connects to an endpoint of the cluster, and sets `tried` to it. If the cluster is at its connection limit,
/// the client waits for a free place. Without a client, this function fails.
pub(crate) async fn connect(
    worker: &Rc<Worker>,
    origin: &Origin,
    client: Option<WaitingClient<'_>>,
    proxy: &TcpProxy,
    tried: &mut AttemptedEndpoint,
) -> Result<Server, Error> {
    let missing = || Error::new(Kind::ClusterNotFound(503));
    let name = match &proxy.targets {
        Targets::Single(name) => Some(name),
        Targets::Weighted { total, targets } => {
            route::weighted(*total, targets, &mut worker.rng.borrow_mut()).map(|target| &target.cluster)
        }
        // A TCP connection has no header fields.
        Targets::Header(_) => None,
    };
    let name = name.ok_or_else(missing)?;
    let pool = worker.pool(name, &origin.snapshot).ok_or_else(missing)?;
    let hash = proxy.hash_source_ip && pool.cluster.balancer.hashes();
    let hash = hash.then(|| balance::hash::of(origin.source.ip().to_string().as_bytes()));
    let options = PickOptions { hash, ..PickOptions::default() };
    let mut client = client;
    let host = match (&pool.resolved, origin.chain.sni_port, origin.server_name()) {
        (Some(_), Some(port), Some(name)) => {
            let found = async {
                let found = pick::resolved(&pool, name, port, 0).await;
                found.unwrap_or_else(|| Err(Error::new(Kind::NoHealthyUpstream)))
            };
            match &mut client {
                Some(client) => client.wait(proxy, found).await?,
                None => found.await?,
            }
        }
        _ => pick::endpoint(&worker.rng, &pool, origin.destination, options)?,
    };
    let (pool, host) = tried.insert((pool, host));
    let place = match client {
        Some(mut client) => client.wait(proxy, upstream::place(pool, host)).await?,
        // An early connection must not take the place of a client that waits.
        None => pool.admit(host).map_err(|LimitReached| Error::new(Kind::Overflow))?,
    };
    let offer = if proxy.tunnel.is_some() { AlpnOffer::TUNNEL } else { AlpnOffer::BYTES };
    let offer = offer.for_client(origin.ends());
    let got = upstream::bytes(pool, host, &offer, &worker.shared.dialer, place).await;
    let outcome = got.inspect_err(|error| pool.note_failure(&host.endpoint, &error.kind, &worker.rng));
    let Upstream { wire, link } = outcome?;
    pool.note(&host.endpoint, UpstreamResult::Connected, &worker.rng);
    link.peer.set_workload(host.endpoint.workload.clone());
    match wire {
        Wire::Http1(mut stream) => {
            let mut framing = None;
            if let Some(tunneling) = &proxy.tunnel {
                let opened = timeout(pool.cluster.connect_timeout, open(&mut stream, tunneling)).await;
                let opened = opened.unwrap_or_else(|| Err(Error::new(Kind::ConnectTimeout)));
                framing = opened
                    .inspect_err(|error| pool.note_failure(&host.endpoint, &error.kind, &worker.rng))?;
            }
            Ok((*stream, link, framing.map(Box::new)))
        }
        Wire::Http2(_) => Err(Error::new(Kind::UpstreamProtocol)),
    }
}

/// Asks the proxy on this connection for a tunnel, and returns the framing of the bytes that it sends; `None` for bytes
/// without framing. Bytes behind the response stay in the input.
async fn open(stream: &mut Stream, tunneling: &Tunneling) -> Result<Option<Framing>, Error> {
    let target = &tunneling.target;
    let (method, path, fields) = match tunneling.is_post {
        false => ("CONNECT", &**target, ""),
        true => ("POST", "/", "Transfer-Encoding: chunked\r\n"),
    };
    let request = format!("{method} {path} HTTP/1.1\r\nHost: {target}\r\n{fields}\r\n");
    stream.output.extend(request.as_bytes());
    let closed = |error: std::io::Error| Error::caused(Kind::UpstreamClosed, error);
    poll_fn(|cx| stream.poll_flush(cx)).await.map_err(closed)?;
    let (mut scan, mut head) = (Scan::default(), ResponseHead::default());
    loop {
        let answer = poll_fn(|cx| poll_head(cx, stream, (&mut scan, &HEAD), method, &mut head)).await?;
        let Some((framing, _)) = answer else { continue };
        return match head.status() {
            200..=299 => Ok(tunneling.is_post.then_some(framing)),
            status => {
                let cause = format!("the proxy refused the tunnel to {target} with status {status}");
                Err(Error::caused(Kind::ConnectFailed, cause))
            }
        };
    }
}
