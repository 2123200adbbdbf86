//! The first bytes of a connection: the PROXY header and the inspection.
//!
//! While a client sends nothing and its first bytes select the filter chain, the inspection connects to the server,
//! which may send first ([`EarlyUpstream`]).

use std::{
    future::poll_fn,
    io,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use crate::{
    overload::drain::ConnectionSet,
    tcp::early::EarlyUpstream,
    worker::inspect::{Findings, HttpInspector, InspectionState, TlsInspector},
};
use skysail_http::{
    proxy_protocol::{self, Addresses, ParsedHeader},
    socket::Stream,
    timer::{Timer, earlier},
};
use skysail_policy::config::{
    Listener,
    listener::{ProxyProtocolFilter, Transport},
};

/// Maximum number of bytes that are inspected.
const MAX_INSPECTED: usize = 64 * 1024;
/// Maximum number of reads for the inspection. The largest client hello and the largest PROXY protocol header need a
/// quarter of them if each read returns a segment of the smallest usual size.
const MAX_READS: u32 = 512;

/// Reads the PROXY header and removes it from the input. Returns `None` without a header, or for one without addresses.
pub(super) async fn proxy_header(
    stream: &mut Stream,
    timer: &mut Timer,
    connections: &ConnectionSet,
    proxied: &ProxyProtocolFilter,
    timeout: Option<Duration>,
) -> io::Result<Option<Addresses>> {
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    for _ in 0..MAX_READS {
        match proxy_protocol::parse(stream.input.bytes()) {
            ParsedHeader::Complete(version, _, _) if proxied.refused.contains(&version) => {
                return Err(io::Error::other(format!(
                    "version {version:?} of the PROXY protocol is refused"
                )));
            }
            ParsedHeader::Complete(_, length, ends) => {
                stream.input.consume(length);
                return Ok(ends);
            }
            ParsedHeader::Absent if proxied.optional => return Ok(None),
            ParsedHeader::Absent => return Err(io::Error::other("the PROXY header is missing")),
            ParsedHeader::Invalid => return Err(io::Error::other("the PROXY header is malformed")),
            ParsedHeader::Incomplete => {}
        }
        if stream.input.is_full() {
            stream.input.grow(proxy_protocol::MAX);
        }
        match fill_until(stream, timer, connections, deadline).await? {
            Some(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Some(_) => {}
            None => return Err(io::ErrorKind::TimedOut.into()),
        }
    }
    Err(io::Error::other(format!("the PROXY header is incomplete after {MAX_READS} reads")))
}

/// Inspection of the first bytes of a connection.
pub(super) struct Inspection<'a, D, W> {
    stream: &'a mut Stream,
    timer: &'a mut Timer,
    connections: &'a ConnectionSet,
    listener: &'a Listener,
    deadline: Option<Instant>,
    reads: u32,
    /// Connects to the server that may send first; called at most once.
    dial: Option<D>,
    /// Returns the time that the client has to send first.
    patience: W,
    /// Time at which `dial` is called if the client has sent nothing.
    dial_at: Option<Instant>,
    early: Option<EarlyUpstream>,
}

impl<'a, D: FnOnce() -> Option<EarlyUpstream>, W: Fn() -> Duration> Inspection<'a, D, W> {
    /// Begins an inspection. `dial` connects to a server that may send first, if the client is silent for `patience`.
    pub(super) fn new(
        stream: &'a mut Stream,
        timer: &'a mut Timer,
        connections: &'a ConnectionSet,
        listener: &'a Listener,
        (dial, patience): (D, W),
    ) -> Self {
        let deadline = listener.inspect_timeout.map(|timeout| Instant::now() + timeout);
        let dial = Some(dial);
        let (dial_at, early) = (None, None);
        Self { stream, timer, connections, listener, deadline, reads: 0, dial, patience, dial_at, early }
    }

    /// Waits for the first bytes and inspects them: for TLS, then for HTTP in plain text, as far as requested. Returns
    /// the early connection to the server if the client has not sent first.
    pub(super) async fn run(
        mut self,
        tls: bool,
        http: bool,
    ) -> io::Result<(Findings, Option<EarlyUpstream>)> {
        let mut findings = Findings::default();
        let inspectors = [
            tls.then(|| Inspector::Tls(TlsInspector::default())),
            http.then(|| Inspector::Http(HttpInspector::default())),
        ];
        for mut inspector in inspectors.into_iter().flatten() {
            if findings.transport == Some(Transport::Tls) {
                break;
            }
            while !self.is_known(&mut inspector, &mut findings)? {
                let mut idle_drain_end = None;
                match poll_fn(|cx| self.poll_first_sender(cx, &mut idle_drain_end)).await? {
                    FirstSender::Client(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    FirstSender::Client(_) => self.reads += 1,
                    FirstSender::Server => {
                        findings.transport = Some(Transport::RawBuffer);
                        return Ok((findings, self.early));
                    }
                    FirstSender::Neither if self.listener.continue_on_timeout => {
                        return Ok((findings, self.early));
                    }
                    FirstSender::Neither => return Err(io::ErrorKind::TimedOut.into()),
                }
            }
        }
        Ok((findings, self.early))
    }

    /// Inspects the bytes so far. Returns false if more are needed, for which there is then room.
    #[inline]
    fn is_known(&mut self, inspector: &mut Inspector, findings: &mut Findings) -> io::Result<bool> {
        let bytes = self.stream.input.bytes();
        let is_last = bytes.len() >= MAX_INSPECTED || self.reads >= MAX_READS;
        let state = match inspector {
            Inspector::Tls(inspector) => inspector.inspect(bytes, is_last, findings),
            Inspector::Http(inspector) => inspector.inspect(bytes, is_last, findings),
        };
        match state {
            InspectionState::Known => return Ok(true),
            InspectionState::Broken => {
                let (length, reads) = (bytes.len(), self.reads);
                return Err(io::Error::other(format!(
                    "the TLS client hello is malformed ({length} bytes in {reads} reads)"
                )));
            }
            InspectionState::More if bytes.is_empty() => {}
            // The client has sent first.
            InspectionState::More => self.early = None,
        }
        if self.stream.input.is_full() {
            self.stream.input.grow(MAX_INSPECTED);
        }
        Ok(false)
    }

    /// Waits for bytes of either peer. Connects to the server when the client has been silent for too long.
    #[inline]
    fn poll_first_sender(
        &mut self,
        cx: &mut Context<'_>,
        idle_drain_end: &mut Option<Instant>,
    ) -> Poll<io::Result<FirstSender>> {
        loop {
            if let Poll::Ready(filled) = self.stream.poll_fill(cx) {
                return Poll::Ready(filled.map(FirstSender::Client));
            }
            let is_silent = self.stream.input.is_empty();
            if is_silent && self.early.as_mut().is_some_and(|early| early.poll(cx).is_ready()) {
                return Poll::Ready(Ok(FirstSender::Server));
            }
            let due = match &self.early {
                _ if !is_silent => None,
                Some(early) => early.due(),
                None if self.dial.is_none() => None,
                None => {
                    let begin = || Instant::now() + (self.patience)();
                    Some(*self.dial_at.get_or_insert_with(begin))
                }
            };
            // A drain does not wait for a silent client that has no server.
            let has_no_server = self.dial.is_none() && self.early.is_none();
            if is_silent && has_no_server && idle_drain_end.is_none() {
                *idle_drain_end = self.connections.idle_drain().map(|time| Instant::now() + time);
            }
            let last = earlier(self.deadline, *idle_drain_end);
            ready!(self.timer.poll(cx, earlier(last, due)));
            if last.is_some_and(|last| Instant::now() >= last) {
                return Poll::Ready(Ok(FirstSender::Neither));
            }
            if let Some(dial) = self.dial.take() {
                self.early = dial();
            }
        }
    }
}

/// Inspection for one protocol.
enum Inspector {
    Tls(TlsInspector),
    Http(HttpInspector),
}

/// The peer that sends first.
enum FirstSender {
    /// The client: the number of bytes, or 0 at the end of the connection.
    Client(usize),
    Server,
    /// The time limit has passed.
    Neither,
}

/// Reads more bytes. Returns `None` if the deadline passes first; a drain shortens it for a client that has sent
/// nothing.
async fn fill_until(
    stream: &mut Stream,
    timer: &mut Timer,
    connections: &ConnectionSet,
    deadline: Option<Instant>,
) -> io::Result<Option<usize>> {
    let mut idle_drain_end = None;
    poll_fn(|cx| {
        if let Poll::Ready(filled) = stream.poll_fill(cx) {
            return Poll::Ready(filled.map(Some));
        }
        if idle_drain_end.is_none() && stream.input.is_empty() {
            idle_drain_end = connections.idle_drain().map(|time| Instant::now() + time);
        }
        timer.poll(cx, earlier(deadline, idle_drain_end)).map(|()| Ok(None))
    })
    .await
}
