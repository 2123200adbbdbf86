//! Server-first protocols, such as those of MySQL and SMTP. While a client sends nothing, the proxy connects to the
//! server that the client would reach as plain TCP. If the server sends first, the connection is plain TCP.
//!
//! An HTTP server may also send first: its HTTP/2 settings, or an unsolicited HTTP/1 response such as 408. These decide
//! nothing, because the HTTP configuration must apply to the client's request. The metadata of a sidecar decide nothing
//! either.

use std::{
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use tracing::debug;

use crate::{
    tcp::{self, Server},
    worker::{Worker, downstream::Origin},
};
use skysail_policy::{
    config::{
        FilterChain,
        listener::{TcpProxy, Terminal},
    },
    peer::greeting::{self, FirstMessage},
};

/// Time that a client has to send first. Nearly all clients that send first do so earlier, and no upstream connection
/// is wasted.
pub(crate) const CLIENT_FIRST_TIMEOUT: Duration = Duration::from_millis(5);
/// The same where the client may speak TLS that ends here, such as the mutual TLS of the mesh (PERMISSIVE). It sends first
/// then, but its first bytes may be late on a busy machine, and the server's bytes in plain text would break the connection.
pub(crate) const TLS_CLIENT_FIRST_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum time for which a silent server is held; the idle timeout, if that is shorter.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// Delay before another attempt at a server that could not be reached: the first one, and the maximum.
const RETRY_DELAYS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(10)];

/// A connection to a server that may send first.
pub(crate) struct EarlyUpstream {
    worker: Rc<Worker>,
    /// The client's connection, with the filter chain for plain TCP.
    origin: Rc<Origin>,
    /// Deadline of the wait for the server.
    until: Instant,
    retry_delay: Duration,
    state: EarlyUpstreamState,
}

enum EarlyUpstreamState {
    Dialling(Pin<Box<dyn Future<Output = Option<Server>>>>),
    Open(Box<Server>),
    /// The server could not be reached; the time of the next attempt.
    Failed(Instant),
    /// The proxy no longer waits for the server: the client must send first.
    Over,
}

impl EarlyUpstream {
    /// Connects to the server of a client that has been silent for too long. Returns `None` if the
    /// filter chain for plain TCP has TLS, calls external authorization, or denies the connection: the client must send
    /// first then.
    pub(crate) fn new(worker: &Rc<Worker>, origin: Origin) -> Option<Self> {
        let chain = origin.chain.clone();
        let Terminal::Tcp(proxy) = &chain.terminal else { return None };
        if chain.tls.is_some() || chain.external_authorization.is_some() || !origin.is_allowed() {
            return None;
        }
        let (worker, origin) = (worker.clone(), Rc::new(origin));
        let wait = proxy.idle_timeout.map_or(MAX_WAIT, |idle| idle.min(MAX_WAIT));
        let state = EarlyUpstreamState::Dialling(dial(worker.clone(), origin.clone(), proxy.clone()));
        Some(Self { worker, origin, until: Instant::now() + wait, retry_delay: RETRY_DELAYS[0], state })
    }

    /// Returns the time of the next poll if no other event occurs.
    pub(crate) fn due(&self) -> Option<Instant> {
        match self.state {
            EarlyUpstreamState::Dialling(_) | EarlyUpstreamState::Open(_) => Some(self.until),
            EarlyUpstreamState::Failed(again) => Some(again.min(self.until)),
            EarlyUpstreamState::Over => None,
        }
    }

    /// Waits while the client is silent. Ready once the server has sent bytes, or has closed the connection.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let now = Instant::now();
            if now >= self.until {
                self.state = EarlyUpstreamState::Over;
            }
            self.state = match &mut self.state {
                EarlyUpstreamState::Dialling(dialling) => match ready!(dialling.as_mut().poll(cx)) {
                    Some(server) => EarlyUpstreamState::Open(Box::new(server)),
                    None => {
                        let again = now + self.retry_delay;
                        self.retry_delay = (2 * self.retry_delay).min(RETRY_DELAYS[1]);
                        EarlyUpstreamState::Failed(again)
                    }
                },
                EarlyUpstreamState::Open(server) => match ready!(poll_first_bytes(server, cx)) {
                    FirstBytes::Incomplete => continue,
                    FirstBytes::Tcp => return Poll::Ready(()),
                    FirstBytes::Http => EarlyUpstreamState::Over,
                },
                EarlyUpstreamState::Failed(again) if now < *again => return Poll::Pending,
                EarlyUpstreamState::Failed(_) => {
                    let Terminal::Tcp(proxy) = &self.origin.chain.terminal else { return Poll::Pending };
                    EarlyUpstreamState::Dialling(dial(
                        self.worker.clone(),
                        self.origin.clone(),
                        proxy.clone(),
                    ))
                }
                EarlyUpstreamState::Over => return Poll::Pending,
            };
        }
    }

    /// Returns whether the connection was made for this filter chain.
    pub(crate) fn is_for(&self, chain: &Arc<FilterChain>) -> bool {
        Arc::ptr_eq(&self.origin.chain, chain)
    }

    /// Returns the connection to the server, once it is established; `None` if that fails.
    pub(crate) async fn server(self) -> Option<Server> {
        match self.state {
            EarlyUpstreamState::Dialling(dialling) => dialling.await,
            EarlyUpstreamState::Open(server) => Some(*server),
            EarlyUpstreamState::Failed(_) | EarlyUpstreamState::Over => None,
        }
    }
}

fn dial(
    worker: Rc<Worker>,
    origin: Rc<Origin>,
    proxy: Arc<TcpProxy>,
) -> Pin<Box<dyn Future<Output = Option<Server>>>> {
    Box::pin(async move {
        let dialled = tcp::connect(&worker, &origin, None, &proxy, &mut None).await;
        let failed =
            |error: &_| debug!("early connection to the server for client {} failed: {error}", origin.source);
        dialled.inspect_err(failed).ok()
    })
}

/// Classification of the bytes that a server sends first.
#[derive(Debug, PartialEq, Eq)]
enum FirstBytes {
    /// No bytes, or too few to tell.
    Incomplete,
    /// Bytes of a server-first protocol, or the end of the connection.
    Tcp,
    /// HTTP/2 settings, or an HTTP/1 response.
    Http,
}

fn poll_first_bytes((stream, link, _): &mut Server, cx: &mut Context<'_>) -> Poll<FirstBytes> {
    let has_greeting = link.pool().cluster.metadata_exchange && stream.alpn() == Some(greeting::ALPN);
    // Bytes may have arrived together with the response that opened a tunnel.
    match classify(stream.input.bytes(), has_greeting) {
        FirstBytes::Incomplete => {}
        known => return Poll::Ready(known),
    }
    if stream.input.is_full() {
        // Neither HTTP nor metadata fill the buffer.
        return Poll::Ready(FirstBytes::Tcp);
    }
    Poll::Ready(match ready!(stream.poll_fill(cx)) {
        Ok(1..) => classify(stream.input.bytes(), has_greeting),
        // The server has closed the connection; the client's connection is closed as well.
        _ => FirstBytes::Tcp,
    })
}

/// Classifies the first bytes of a server. `has_greeting` says that the metadata of a sidecar may precede them.
fn classify(bytes: &[u8], has_greeting: bool) -> FirstBytes {
    let bytes = match greeting::read(bytes) {
        FirstMessage::Incomplete if has_greeting => return FirstBytes::Incomplete,
        FirstMessage::Complete(length, _) if has_greeting => &bytes[length..],
        _ => bytes,
    };
    // A SETTINGS frame (RFC 9113, section 6.5): length, type 4, no flags, stream 0.
    let settings = [None, None, None, Some(4), Some(0), Some(0), Some(0), Some(0), Some(0)];
    let fits = bytes.iter().zip(settings).all(|(byte, wanted)| wanted.is_none_or(|wanted| *byte == wanted));
    let is_short = bytes.first().is_none_or(|first| *first == 0);
    let answer = b"HTTP/";
    let shared = bytes.len().min(answer.len());
    if bytes[..shared] == answer[..shared] {
        return if shared == answer.len() { FirstBytes::Http } else { FirstBytes::Incomplete };
    }
    match (fits && is_short, bytes.len() >= settings.len()) {
        (true, true) => FirstBytes::Http,
        (true, false) => FirstBytes::Incomplete,
        (false, _) => FirstBytes::Tcp,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_bytes_of_an_http_server_are_detected() {
        let settings = [0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 100];
        for end in 0..settings.len() {
            let expected = if end < 9 { FirstBytes::Incomplete } else { FirstBytes::Http };
            assert_eq!(classify(&settings[..end], false), expected, "{end}");
        }
        assert_eq!(classify(b"HTT", false), FirstBytes::Incomplete);
        assert_eq!(classify(b"HTTP/1.1 408 Request Timeout\r\n", false), FirstBytes::Http);
        for greeting in
            [&b"220 ready"[..], b"HT!", b"J\0\0\0\x0a8.0", b"\0\0\0\x01", b"\0\0\0\x04\0\0\0\0\x01"]
        {
            assert_eq!(classify(greeting, false), FirstBytes::Tcp, "{greeting:?}");
        }
    }

    #[test]
    fn metadata_of_a_sidecar_are_skipped() {
        let greeting = [0x3d, 0x23, 4, 0x67, 0, 0, 0, 1, 255];
        for end in 0..=greeting.len() {
            assert_eq!(classify(&greeting[..end], true), FirstBytes::Incomplete, "{end}");
        }
        assert_eq!(classify(&[&greeting[..], b"220"].concat(), true), FirstBytes::Tcp);
        assert_eq!(classify(&[&greeting[..], b"HTTP/1.1"].concat(), true), FirstBytes::Http);
        assert_eq!(classify(&greeting, false), FirstBytes::Tcp);
    }
}
