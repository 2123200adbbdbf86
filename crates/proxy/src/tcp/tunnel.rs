//! Two connections whose bytes are forwarded to each other.

use std::{
    future::poll_fn,
    io,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use skysail_http::{
    buffer::Buffer,
    http1::{BodyDecoder, Framing, write},
    socket::Stream,
    splice::Pipe,
    timer::{Timer, earlier},
};
use skysail_policy::{
    config::cluster::Workload,
    peer::greeting::{self, FirstMessage},
};

use super::connect::HEAD;

/// Minimum bytes of one read for which a pipe is used; fewer are copied.
const MIN_SPLICED: usize = 4 * 1024;

/// Reason why [`Tunnel::run`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Both directions have ended, or one has failed.
    Closed,
    /// The idle timeout has passed.
    Idle,
    /// The configuration in effect does not admit the connection.
    Revoked,
    /// The tunnel is open; its bytes are due to be counted.
    Reported,
    /// The tunnel is open; the metadata of a peer have arrived.
    Greeted,
}

/// Two connections whose bytes are forwarded to each other.
#[derive(Default)]
pub(crate) struct Tunnel {
    up: TcpDirection,
    down: TcpDirection,
    moved: Option<Instant>,
}

/// One direction of a tunnel.
#[derive(Default)]
struct TcpDirection {
    state: DirectionState,
    /// Method that forwards the next bytes.
    passage: TransferMode,
    /// Holds spliced bytes that have not been written yet.
    pipe: Option<Pipe>,
    /// Metadata of the sender, if ALPN negotiated their exchange.
    greeting: Option<PeerMetadataState>,
    /// Conversion of the bytes, if the tunnel is within bodies of HTTP/1.1. Boxed, because it is rare.
    coding: Option<Box<Coding>>,
}

/// Conversion between bytes and a body of HTTP/1.1.
enum Coding {
    /// The receiver gets chunks.
    Encode,
    /// The sender sends a body.
    Decode(BodyDecoder),
}

/// Method of forwarding bytes. A pipe (`splice`) avoids copies, but costs more than copies if the bytes are
/// few.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum TransferMode {
    #[default]
    Buffers,
    /// Used after a read that has filled the input buffer.
    Pipe,
    /// Pipes are not available: some sandboxes refuse them.
    NoPipe,
}

/// State of the metadata that a peer sends first.
enum PeerMetadataState {
    Expected,
    /// The metadata have arrived; `None` if the peer sent none.
    Received(Option<Workload>),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum DirectionState {
    #[default]
    Open,
    /// The sender has ended; the receiver's side is not shut down yet.
    Ending,
    Done,
}

impl Tunnel {
    /// Returns a tunnel whose server gets the bytes as chunks of a request, and sends those of a response.
    pub(super) fn in_bodies(response: Framing) -> Self {
        let mut tunnel = Self::default();
        let decoder = BodyDecoder::new(response);
        if decoder.is_done() {
            tunnel.down.state = DirectionState::Ending;
        }
        tunnel.up.coding = Some(Box::new(Coding::Encode));
        tunnel.down.coding = Some(Box::new(Coding::Decode(decoder)));
        tunnel
    }

    /// Sends this workload's metadata to the client if ALPN negotiated their exchange, and expects the client's.
    pub(super) fn greet_client(&mut self, client: &mut Stream, greeting: &[u8]) {
        self.up.greeting = send_greeting(client, greeting);
    }

    /// Does the same with the server.
    pub(super) fn greet_server(&mut self, server: &mut Stream, greeting: &[u8]) {
        self.down.greeting = send_greeting(server, greeting);
    }

    /// Forwards bytes until the tunnel ends, the idle timeout passes, or a peer's metadata arrive. Also
    /// returns at the time `report` and at the deadline that `revoked` returns.
    pub(crate) async fn run(
        &mut self,
        client: &mut Stream,
        server: &mut Stream,
        timer: &mut Timer,
        idle_timeout: Option<Duration>,
        report: Option<Instant>,
        mut revoked: impl FnMut() -> Option<Instant>,
    ) -> Ended {
        poll_fn(|cx| {
            let revoked = revoked();
            if revoked.is_some_and(|end| Instant::now() >= end) {
                return Poll::Ready(Ended::Revoked);
            }
            let before = (client.received, server.received, client.sent, server.sent);
            let directions = [self.up.poll(cx, client, server), self.down.poll(cx, server, client)];
            if directions.iter().any(|direction| matches!(direction, Poll::Ready(Err(_)))) {
                return Poll::Ready(Ended::Closed);
            }
            if (self.up.state, self.down.state) == (DirectionState::Done, DirectionState::Done) {
                return Poll::Ready(Ended::Closed);
            }
            if [&self.up, &self.down]
                .iter()
                .any(|direction| matches!(direction.greeting, Some(PeerMetadataState::Received(_))))
            {
                return Poll::Ready(Ended::Greeted);
            }
            if idle_timeout.is_some()
                && before != (client.received, server.received, client.sent, server.sent)
            {
                self.moved = Some(Instant::now());
            }
            let idle = idle_timeout.map(|timeout| *self.moved.get_or_insert_with(Instant::now) + timeout);
            ready!(timer.poll(cx, earlier(earlier(idle, report), revoked)));
            if revoked.is_some_and(|end| Instant::now() >= end) {
                return Poll::Ready(Ended::Revoked);
            }
            let is_idle = idle.is_some_and(|idle| Instant::now() >= idle);
            Poll::Ready(if is_idle { Ended::Idle } else { Ended::Reported })
        })
        .await
    }

    /// Returns whether the metadata of a peer are yet to arrive.
    pub(super) fn expects_greeting(&self) -> bool {
        self.up.greeting.is_some() || self.down.greeting.is_some()
    }

    /// Takes the metadata of the two peers that have arrived since the last call.
    pub(super) fn take_workloads(&mut self) -> [Option<Workload>; 2] {
        [&mut self.up, &mut self.down].map(|direction| match direction.greeting.take() {
            Some(PeerMetadataState::Received(workload)) => workload,
            other => {
                direction.greeting = other;
                None
            }
        })
    }
}

impl TcpDirection {
    fn poll(&mut self, cx: &mut Context<'_>, from: &mut Stream, to: &mut Stream) -> Poll<io::Result<()>> {
        loop {
            if ready!(self.poll_flush(cx, to)).is_err() {
                // The receiver has closed, but bytes of the other direction may still be in flight.
                to.output.clear();
                self.pipe = None;
                self.state = DirectionState::Done;
            }
            if self.state == DirectionState::Done {
                return Poll::Ready(Ok(()));
            }
            if !self.read_greeting(from)? && !from.input.is_empty() {
                self.pass(&mut from.input, &mut to.output)?;
                continue;
            }
            match self.state {
                DirectionState::Done => {}
                DirectionState::Ending => {
                    // The end of a request is its last chunk: servers may drop a request whose connection ends.
                    if !matches!(self.coding.as_deref(), Some(Coding::Encode)) {
                        ready!(to.poll_shutdown(cx))?;
                    }
                    self.state = DirectionState::Done;
                }
                DirectionState::Open => {
                    if ready!(self.poll_fill(cx, from, to.is_plain()))? == 0 {
                        self.end(&mut to.output)?;
                    }
                }
            }
        }
    }

    /// Moves bytes that have been read to the output.
    fn pass(&mut self, input: &mut Buffer, output: &mut Buffer) -> io::Result<()> {
        match self.coding.as_deref_mut() {
            // The buffers are swapped; no bytes are copied.
            None => std::mem::swap(output, input),
            Some(Coding::Encode) => {
                write::data(output, Framing::Chunked, input.bytes());
                input.clear();
            }
            // Bytes behind the response belong to nothing.
            Some(Coding::Decode(decoder)) if decoder.is_done() => input.clear(),
            Some(Coding::Decode(decoder)) => {
                let piece = decoder.next(input.bytes(), &HEAD).map_err(|bad| io::Error::other(bad.reason))?;
                output.extend(&input.bytes()[piece.skip..][..piece.data]);
                input.consume(piece.skip + piece.data);
                if decoder.is_done() {
                    self.state = DirectionState::Ending;
                }
            }
        }
        Ok(())
    }

    /// Handles the end of the sender.
    fn end(&mut self, output: &mut Buffer) -> io::Result<()> {
        let is_complete = match self.coding.as_deref_mut() {
            Some(Coding::Encode) => {
                write::finish(output, Framing::Chunked, None);
                true
            }
            Some(Coding::Decode(decoder)) => decoder.close(),
            None => true,
        };
        if !is_complete {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.state = DirectionState::Ending;
        Ok(())
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>, to: &mut Stream) -> Poll<io::Result<()>> {
        ready!(to.poll_flush(cx))?;
        match &mut self.pipe {
            Some(pipe) => to.poll_drain_pipe(cx, pipe),
            None => Poll::Ready(Ok(())),
        }
    }

    /// Reads more from the sender; returns 0 at its end. All bytes of earlier reads must have been forwarded.
    fn poll_fill(&mut self, cx: &mut Context<'_>, from: &mut Stream, plain: bool) -> Poll<io::Result<usize>> {
        from.rest();
        if self.passage == TransferMode::Pipe && self.pipe.is_none() {
            self.pipe = Pipe::lend();
        }
        if let Some(pipe) = &mut self.pipe {
            let filled = from.poll_fill_pipe(cx, pipe);
            match &filled {
                Poll::Ready(Ok(count)) if *count >= MIN_SPLICED => return filled,
                Poll::Ready(Ok(_)) => self.passage = TransferMode::Buffers,
                Poll::Ready(Err(error)) if is_splice_unsupported(error) => {
                    self.passage = TransferMode::NoPipe;
                }
                Poll::Ready(Err(_)) | Poll::Pending => {}
            }
            if pipe.is_empty() {
                self.pipe = None;
            }
            if self.passage != TransferMode::NoPipe {
                return filled;
            }
        }
        let count = ready!(from.poll_fill(cx))?;
        let is_plain = plain && from.is_plain() && self.coding.is_none();
        if from.input.is_full() && self.passage == TransferMode::Buffers && is_plain {
            self.passage = TransferMode::Pipe;
        }
        Poll::Ready(Ok(count))
    }

    /// Reads the metadata that the sender sends first. Returns true while they are incomplete.
    fn read_greeting(&mut self, from: &mut Stream) -> io::Result<bool> {
        if !matches!(self.greeting, Some(PeerMetadataState::Expected)) {
            return Ok(false);
        }
        match greeting::read(from.input.bytes()) {
            FirstMessage::Incomplete if self.state == DirectionState::Open && !from.input.is_full() => {
                return Ok(true);
            }
            FirstMessage::TooLarge => return Err(io::Error::other("the metadata of the peer are too large")),
            FirstMessage::Complete(length, workload) => {
                from.input.consume(length);
                self.greeting = Some(PeerMetadataState::Received(workload));
            }
            FirstMessage::Incomplete | FirstMessage::Absent => {
                self.greeting = Some(PeerMetadataState::Received(None));
            }
        }
        Ok(false)
    }
}

/// Sends this workload's metadata if ALPN negotiated their exchange, and expects those of the peer.
fn send_greeting(stream: &mut Stream, greeting: &[u8]) -> Option<PeerMetadataState> {
    if stream.alpn() != Some(greeting::ALPN) {
        return None;
    }
    stream.output.extend(greeting);
    Some(PeerMetadataState::Expected)
}

/// Returns whether the error means that the system does not support `splice` on these sockets. With an empty
/// pipe, `splice` then fails before it moves any byte.
fn is_splice_unsupported(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported | io::ErrorKind::PermissionDenied
    )
}

#[cfg(test)]
mod tests;
