//! Connections of the TCP proxy to endpoints, and tunnels through HTTP proxies (`tunneling_config`): CONNECT, RFC 9110
//! section 9.3.6, over HTTP/1.1.

use std::{
    future::poll_fn,
    rc::Rc,
    task::{Context, Poll, ready},
};

use skysail_http::{socket::Stream, timer::timeout, wire::Wire};
use skysail_policy::{
    balance::{self, PickOptions},
    config::{listener::TcpProxy, route::Targets},
    error::{Error, Kind},
    outlier::UpstreamResult,
    route,
};

use super::{AttemptedEndpoint, Server, WaitingClient};
use crate::{
    upstream::{
        self, AlpnOffer, pick,
        pool::{LimitReached, Upstream},
    },
    worker::{Worker, downstream::Origin},
};

/// Maximum size of the response's head in bytes.
const MAX_HEAD: usize = 16 * 1024;

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
    let got = upstream::bytes(
        pool,
        host,
        &AlpnOffer::BYTES.for_client(origin.ends()),
        &worker.shared.dialer,
        place,
    )
    .await;
    let outcome = got.inspect_err(|error| pool.note_failure(&host.endpoint, &error.kind, &worker.rng));
    let Upstream { wire, link } = outcome?;
    pool.note(&host.endpoint, UpstreamResult::Connected, &worker.rng);
    link.peer.set_workload(host.endpoint.workload.clone());
    match wire {
        Wire::Http1(mut stream) => {
            if let Some(target) = &proxy.tunnel {
                let opened = timeout(pool.cluster.connect_timeout, open(&mut stream, target)).await;
                let opened = opened.unwrap_or_else(|| Err(Error::new(Kind::ConnectTimeout)));
                opened.inspect_err(|error| pool.note_failure(&host.endpoint, &error.kind, &worker.rng))?;
            }
            Ok((*stream, link))
        }
        Wire::Http2(_) => Err(Error::new(Kind::UpstreamProtocol)),
    }
}

/// Asks the proxy on this connection for a tunnel to `target` (HOST:PORT). Bytes behind the response stay in the input.
async fn open(stream: &mut Stream, target: &str) -> Result<(), Error> {
    let request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n");
    stream.output.extend(request.as_bytes());
    let closed = |error: std::io::Error| Error::caused(Kind::UpstreamClosed, error);
    poll_fn(|cx| stream.poll_flush(cx)).await.map_err(closed)?;
    poll_fn(|cx| poll_response(stream, target, cx)).await
}

fn poll_response(stream: &mut Stream, target: &str, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
    loop {
        if let Some(end) = end_of_head(stream.input.bytes()) {
            let status = status(stream.input.bytes());
            stream.input.consume(end);
            return Poll::Ready(match status {
                Some(200..=299) => Ok(()),
                Some(status) => {
                    let cause = format!("the proxy refused the tunnel to {target} with status {status}");
                    Err(Error::caused(Kind::ConnectFailed, cause))
                }
                None => Err(Error::new(Kind::UpstreamProtocol)),
            });
        }
        if stream.input.is_full() || stream.input.len() >= MAX_HEAD {
            return Poll::Ready(Err(Error::new(Kind::AnswerTooLarge)));
        }
        match ready!(stream.poll_fill(cx)) {
            Ok(0) => return Poll::Ready(Err(Error::new(Kind::UpstreamClosed))),
            Ok(_) => {}
            Err(error) => return Poll::Ready(Err(Error::caused(Kind::UpstreamClosed, error))),
        }
    }
}

/// Returns the length of a complete head with its empty line.
fn end_of_head(bytes: &[u8]) -> Option<usize> {
    bytes.windows(4).position(|end| end == b"\r\n\r\n").map(|at| at + 4)
}

/// Returns the status of a response of HTTP/1.
fn status(head: &[u8]) -> Option<u16> {
    let rest = head.strip_prefix(b"HTTP/1.1 ").or_else(|| head.strip_prefix(b"HTTP/1.0 "))?;
    let (digits, rest) = rest.split_at_checked(3)?;
    let is_number = digits.iter().all(u8::is_ascii_digit) && matches!(rest.first(), Some(b' ' | b'\r'));
    is_number.then(|| digits.iter().fold(0, |sum, digit| sum * 10 + u16::from(digit - b'0')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_head_ends_with_an_empty_line() {
        assert_eq!(end_of_head(b"HTTP/1.1 200 OK\r\n\r"), None);
        assert_eq!(end_of_head(b"HTTP/1.1 200 OK\r\n\r\nabc"), Some(19));
    }

    #[test]
    fn only_a_status_line_of_http_1_has_a_status() {
        assert_eq!(status(b"HTTP/1.1 200 Connection established\r\n\r\n"), Some(200));
        assert_eq!(status(b"HTTP/1.0 407\r\n\r\n"), Some(407));
        for bytes in
            [&b"HTTP/2 200\r\n\r\n"[..], b"HTTP/1.1 2000\r\n\r\n", b"HTTP/1.1 2x0 \r\n\r\n", b"\r\n\r\n"]
        {
            assert_eq!(status(bytes), None);
        }
    }
}
