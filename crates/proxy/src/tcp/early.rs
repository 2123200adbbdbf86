//! Protocols in which the server speaks first: while a client says nothing, the server that it would reach if it went on in
//! plain bytes is dialled. Whoever speaks first decides what the connection is.
//!
//! What a server of HTTP says on its own decides nothing, as its client is yet to speak and what is configured for HTTP must
//! hold: the settings of HTTP/2, and an answer of HTTP/1 that nobody asked for. Nor does what a sidecar there says of itself.

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
    peer::greeting::{self, Greeting},
};

/// Clients that speak first have nearly always spoken by then, and cost no connection that they have no use for.
pub(crate) const QUIET: Duration = Duration::from_millis(5);
/// A server that is as silent as its client is held for no longer than this, nor for longer than connections may be idle.
const PATIENCE: Duration = Duration::from_secs(60);
/// Before a server that could not be reached is dialled again: at first, and at most.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(10)];

/// A server that is dialled before it is known whether it is wanted.
pub(crate) struct Early {
    worker: Rc<Worker>,
    /// What the connection is if it is plain bytes.
    origin: Rc<Origin>,
    /// Until then it is waited for.
    until: Instant,
    pause: Duration,
    state: EarlyState,
}

enum EarlyState {
    Dialling(Pin<Box<dyn Future<Output = Option<Server>>>>),
    Open(Box<Server>),
    /// It could not be reached, and is dialled again then.
    Failed(Instant),
    /// The client must speak.
    Over,
}

impl Early {
    /// For a client that has been silent for [`QUIET`]. `None` where its bytes would not be passed on, or not without asking
    /// another service: it must speak.
    pub(crate) fn new(worker: &Rc<Worker>, origin: Origin) -> Option<Self> {
        let chain = origin.chain.clone();
        let Terminal::Tcp(proxy) = &chain.terminal else { return None };
        if chain.tls.is_some() || chain.ask.is_some() || !origin.would_pass() {
            return None;
        }
        let (worker, origin) = (worker.clone(), Rc::new(origin));
        let patience = proxy.idle_timeout.map_or(PATIENCE, |idle| idle.min(PATIENCE));
        let state = EarlyState::Dialling(dial(worker.clone(), origin.clone(), proxy.clone()));
        Some(Self { worker, origin, until: Instant::now() + patience, pause: PAUSES[0], state })
    }

    /// When it is to be polled again, if only time passes.
    pub(crate) fn due(&self) -> Option<Instant> {
        match self.state {
            EarlyState::Dialling(_) | EarlyState::Open(_) => Some(self.until),
            EarlyState::Failed(again) => Some(again.min(self.until)),
            EarlyState::Over => None,
        }
    }

    /// Goes on while the client is silent; ready once the server has spoken, or has hung up.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let now = Instant::now();
            if now >= self.until {
                self.state = EarlyState::Over;
            }
            self.state = match &mut self.state {
                EarlyState::Dialling(dialling) => match ready!(dialling.as_mut().poll(cx)) {
                    Some(server) => EarlyState::Open(Box::new(server)),
                    None => {
                        let again = now + self.pause;
                        self.pause = (2 * self.pause).min(PAUSES[1]);
                        EarlyState::Failed(again)
                    }
                },
                EarlyState::Open(server) => match ready!(listen(server, cx)) {
                    Said::Nothing => continue,
                    Said::Bytes => return Poll::Ready(()),
                    Said::Http => EarlyState::Over,
                },
                EarlyState::Failed(again) if now < *again => return Poll::Pending,
                EarlyState::Failed(_) => {
                    let Terminal::Tcp(proxy) = &self.origin.chain.terminal else { return Poll::Pending };
                    EarlyState::Dialling(dial(self.worker.clone(), self.origin.clone(), proxy.clone()))
                }
                EarlyState::Over => return Poll::Pending,
            };
        }
    }

    /// Whether it leads where connections of this chain go.
    pub(crate) fn is_of(&self, chain: &Arc<FilterChain>) -> bool {
        Arc::ptr_eq(&self.origin.chain, chain)
    }

    /// The server, if it has been dialled and is there.
    pub(crate) async fn server(self) -> Option<Server> {
        match self.state {
            EarlyState::Dialling(dialling) => dialling.await,
            EarlyState::Open(server) => Some(*server),
            EarlyState::Failed(_) | EarlyState::Over => None,
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
        let failed = |error: &_| debug!("no server for {}, which is silent: {error}", origin.source);
        dialled.inspect_err(failed).ok()
    })
}

/// What a server has said before its client.
#[derive(Debug, PartialEq, Eq)]
enum Said {
    /// Nothing, or too little to tell.
    Nothing,
    /// What its client is to hear.
    Bytes,
    Http,
}

fn listen((stream, link): &mut Server, cx: &mut Context<'_>) -> Poll<Said> {
    if stream.input.is_full() {
        // Whatever it is, it is no greeting.
        return Poll::Ready(Said::Bytes);
    }
    Poll::Ready(match ready!(stream.poll_fill(cx)) {
        Ok(1..) => {
            let greets = link.pool().cluster.metadata_exchange && stream.alpn() == Some(greeting::ALPN);
            said(stream.input.bytes(), greets)
        }
        // It has hung up, which its client is to know.
        _ => Said::Bytes,
    })
}

/// `greets` says that a sidecar may say first who it is.
fn said(bytes: &[u8], greets: bool) -> Said {
    let bytes = match greeting::read(bytes) {
        Greeting::Incomplete if greets => return Said::Nothing,
        Greeting::Complete(length, _) if greets => &bytes[length..],
        _ => bytes,
    };
    // A frame of settings (RFC 9113, section 6.5): its length, 4, no flags, stream 0.
    let settings = [None, None, None, Some(4), Some(0), Some(0), Some(0), Some(0), Some(0)];
    let fits = bytes.iter().zip(settings).all(|(byte, wanted)| wanted.is_none_or(|wanted| *byte == wanted));
    let is_short = bytes.first().is_none_or(|first| *first == 0);
    let answer = b"HTTP/";
    let shared = bytes.len().min(answer.len());
    if bytes[..shared] == answer[..shared] {
        return if shared == answer.len() { Said::Http } else { Said::Nothing };
    }
    match (fits && is_short, bytes.len() >= settings.len()) {
        (true, true) => Said::Http,
        (true, false) => Said::Nothing,
        (false, _) => Said::Bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_of_http_says_first_decides_nothing() {
        let settings = [0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 100];
        for end in 0..settings.len() {
            let expected = if end < 9 { Said::Nothing } else { Said::Http };
            assert_eq!(said(&settings[..end], false), expected, "{end}");
        }
        assert_eq!(said(b"HTT", false), Said::Nothing);
        assert_eq!(said(b"HTTP/1.1 408 Request Timeout\r\n", false), Said::Http);
        for greeting in
            [&b"220 ready"[..], b"HT!", b"J\0\0\0\x0a8.0", b"\0\0\0\x01", b"\0\0\0\x04\0\0\0\0\x01"]
        {
            assert_eq!(said(greeting, false), Said::Bytes, "{greeting:?}");
        }
    }

    #[test]
    fn what_a_sidecar_says_of_itself_decides_nothing() {
        let greeting = [0x3d, 0x23, 4, 0x67, 0, 0, 0, 1, 255];
        for end in 0..=greeting.len() {
            assert_eq!(said(&greeting[..end], true), Said::Nothing, "{end}");
        }
        assert_eq!(said(&[&greeting[..], b"220"].concat(), true), Said::Bytes);
        assert_eq!(said(&[&greeting[..], b"HTTP/1.1"].concat(), true), Said::Http);
        assert_eq!(said(&greeting, false), Said::Bytes);
    }
}
