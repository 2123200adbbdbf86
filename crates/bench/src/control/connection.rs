//! One HTTP/2 connection to a control plane, with the part of RFC 9113 that the sidecars need.
//!
//! The headers of responses are not parsed, so no field table is kept: its size is announced as zero. Receive windows
//! are as large as possible; the windows of the server are respected.

use std::{
    io::{self, ErrorKind, Read as _, Write as _},
    os::fd::{AsFd, BorrowedFd},
};

use anyhow::{bail, ensure};

use super::message::{Form, Response, Scanner};
use crate::stream::Stream;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const FRAME: usize = 16_384;
/// Maximum window (RFC 9113, section 6.9.1).
const WINDOW: u32 = (1 << 31) - 1;
/// Initial window of a stream and of a connection.
const FIRST_WINDOW: u32 = 65_535;
/// Number of received bytes after which the window is renewed.
const RENEWAL: u64 = 1 << 30;

const DATA: u8 = 0;
pub(super) const HEADERS: u8 = 1;
pub(super) const RESET: u8 = 3;
pub(super) const SETTINGS: u8 = 4;
pub(super) const PING: u8 = 6;
const GOAWAY: u8 = 7;
pub(super) const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const ACK: u8 = 1;
pub(super) const END_HEADERS: u8 = 4;
const PADDED: u8 = 8;

/// The connection and its streams.
pub(crate) struct Connection {
    stream: Stream,
    form: Form,
    output: Vec<u8>,
    written: usize,
    /// Send window of the connection, and initial window of a new stream.
    window: i64,
    first_window: i64,
    calls: Vec<Call>,
    /// Header of the current frame, then the content of a frame other than DATA.
    head: Vec<u8>,
    content: Vec<u8>,
    frame: Option<Frame>,
    /// Bytes received since the window was renewed.
    taken: u64,
    /// Bytes written and read in total.
    sent: u64,
    received: u64,
}

#[derive(Clone, Copy)]
struct Frame {
    kind: u8,
    flags: u8,
    stream: u32,
    left: usize,
}

struct Call {
    scanner: Scanner,
    window: i64,
    /// Bytes that wait for the server's window.
    waiting: Vec<u8>,
}

impl Connection {
    /// Creates the client's side on an open or opening stream. `authority` is the name of the server. The
    /// content of responses is kept up to a length of `max_kept` bytes.
    pub(crate) fn new(stream: Stream, form: Form, calls: usize, authority: &str, max_kept: u64) -> Self {
        Self::with_window(stream, form, calls, authority, max_kept, WINDOW)
    }

    /// Like `new`, with this window for each stream.
    pub(super) fn with_window(
        stream: Stream,
        form: Form,
        calls: usize,
        authority: &str,
        max_kept: u64,
        window: u32,
    ) -> Self {
        let mut output = PREFACE.to_vec();
        let settings = [(1u16, 0u32), (2, 0), (4, window)];
        let settings: Vec<u8> = settings
            .iter()
            .flat_map(|(id, value)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat())
            .collect();
        put_frame(&mut output, SETTINGS, 0, 0, &settings);
        put_frame(&mut output, WINDOW_UPDATE, 0, 0, &(WINDOW - FIRST_WINDOW).to_be_bytes());
        let fields = head(form, authority);
        for number in 0..calls {
            put_frame(&mut output, HEADERS, END_HEADERS, id_of(number), &fields);
        }
        let call =
            || Call { scanner: Scanner::new(max_kept), window: FIRST_WINDOW.into(), waiting: Vec::new() };
        Self {
            stream,
            form,
            output,
            written: 0,
            window: FIRST_WINDOW.into(),
            first_window: FIRST_WINDOW.into(),
            calls: (0..calls).map(|_| call()).collect(),
            head: Vec::with_capacity(9),
            content: Vec::new(),
            frame: None,
            taken: 0,
            sent: 0,
            received: 0,
        }
    }

    /// Sends any frame, also one that violates the protocol.
    pub(super) fn frame(&mut self, kind: u8, flags: u8, stream: u32, content: &[u8]) {
        put_frame(&mut self.output, kind, flags, stream, content);
    }

    /// Returns the number of bytes that wait for the socket or for the server's windows.
    pub(super) fn pending(&self) -> usize {
        let waiting: usize = self.calls.iter().map(|call| call.waiting.len()).sum();
        self.output.len() - self.written + waiting
    }

    /// Returns the number of bytes written and read.
    pub(super) fn traffic(&self) -> (u64, u64) {
        (self.sent, self.received)
    }

    /// Sends a message on a call as far as the window of the server allows.
    pub(crate) fn send(&mut self, call: usize, message: &[u8]) {
        self.calls[call].waiting.extend_from_slice(message);
        self.pass(call);
    }

    fn pass(&mut self, number: usize) {
        let call = &mut self.calls[number];
        loop {
            let max = usize::try_from(call.window.min(self.window)).unwrap_or_default();
            let length = call.waiting.len().min(max).min(FRAME);
            if length == 0 {
                return;
            }
            put_frame(&mut self.output, DATA, 0, id_of(number), &call.waiting[..length]);
            call.waiting.drain(..length);
            call.window -= length as i64;
            self.window -= length as i64;
        }
    }

    /// Writes waiting bytes. Returns true if the kernel has accepted all of them.
    pub(crate) fn flush(&mut self) -> io::Result<bool> {
        while self.written < self.output.len() {
            match self.stream.write(&self.output[self.written..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(length) => {
                    self.written += length;
                    self.sent += length as u64;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.output.clear();
        self.output.shrink_to(1_024);
        self.written = 0;
        if self.stream.holds_output() {
            match self.stream.flush() {
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                other => other?,
            }
        }
        Ok(true)
    }

    /// Reads available bytes, and passes on responses with their calls. Fails when the server ends the connection or
    /// a call.
    pub(crate) fn read(
        &mut self,
        scratch: &mut [u8],
        mut on_response: impl FnMut(&mut Self, usize, Response) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        loop {
            let length = match self.stream.read(scratch) {
                Ok(0) => bail!("the control plane closed the connection"),
                Ok(length) => length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.into()),
            };
            self.taken += length as u64;
            self.received += length as u64;
            let mut bytes = &scratch[..length];
            while !bytes.is_empty() {
                if let Some((call, response)) = self.take(&mut bytes)? {
                    on_response(self, call, response)?;
                }
            }
            if self.taken > RENEWAL {
                let more = u32::try_from(self.taken)?;
                put_frame(&mut self.output, WINDOW_UPDATE, 0, 0, &more.to_be_bytes());
                for number in 0..self.calls.len() {
                    put_frame(&mut self.output, WINDOW_UPDATE, 0, id_of(number), &more.to_be_bytes());
                }
                self.taken = 0;
            }
            // After a full read, more data is likely to be available. TLS returns one record at a time.
            if length < scratch.len() && matches!(self.stream, Stream::Plain(_)) {
                return Ok(());
            }
        }
    }

    fn take(&mut self, bytes: &mut &[u8]) -> anyhow::Result<Option<(usize, Response)>> {
        let Some(mut frame) = self.frame else {
            let wanted = (9 - self.head.len()).min(bytes.len());
            self.head.extend_from_slice(&bytes[..wanted]);
            *bytes = &bytes[wanted..];
            if let [a, b, c, kind, flags, id @ ..] = &self.head[..]
                && let Ok(id) = <[u8; 4]>::try_from(id)
            {
                let left = u32::from_be_bytes([0, *a, *b, *c]) as usize;
                let stream = u32::from_be_bytes(id) & WINDOW;
                let frame = Frame { kind: *kind, flags: *flags, stream, left };
                self.head.clear();
                self.content.clear();
                self.frame = Some(frame);
                if left == 0 {
                    self.end(frame)?;
                }
            }
            return Ok(None);
        };
        let (mut piece, after) = bytes.split_at(frame.left.min(bytes.len()));
        let mut response_of = None;
        if frame.kind == DATA {
            ensure!(frame.flags & PADDED == 0, "the control plane pads its frames");
            let number = call_of(frame.stream)?;
            let form = self.form;
            let call = self.calls.get_mut(number).ok_or_else(|| anyhow::anyhow!("data of no call"))?;
            let before = piece.len();
            response_of = call.scanner.feed(form, &mut piece)?.map(|response| (number, response));
            let used = before - piece.len();
            frame.left -= used;
            *bytes = &bytes[used..];
        } else {
            self.content.extend_from_slice(piece);
            frame.left -= piece.len();
            *bytes = after;
        }
        self.frame = Some(frame);
        if frame.left == 0 {
            self.end(frame)?;
        }
        Ok(response_of)
    }

    /// Handles a complete frame.
    fn end(&mut self, frame: Frame) -> anyhow::Result<()> {
        self.frame = None;
        let content = std::mem::take(&mut self.content);
        let number = |at: usize| -> anyhow::Result<u32> {
            let bytes = content.get(at..at + 4).ok_or_else(|| anyhow::anyhow!("a frame is cut short"))?;
            Ok(u32::from_be_bytes(bytes.try_into()?))
        };
        match frame.kind {
            DATA | HEADERS if frame.flags & END_STREAM != 0 => bail!("the control plane ended a stream"),
            SETTINGS if frame.flags & ACK == 0 => {
                for setting in content.chunks_exact(6) {
                    if setting[..2] == [0, 4] {
                        let first =
                            i64::from(u32::from_be_bytes([setting[2], setting[3], setting[4], setting[5]]));
                        let more = first - self.first_window;
                        self.calls.iter_mut().for_each(|call| call.window += more);
                        self.first_window = first;
                    }
                }
                put_frame(&mut self.output, SETTINGS, ACK, 0, &[]);
                (0..self.calls.len()).for_each(|call| self.pass(call));
            }
            PING if frame.flags & ACK == 0 => put_frame(&mut self.output, PING, ACK, 0, &content),
            WINDOW_UPDATE => {
                let more = i64::from(number(0)?);
                match frame.stream {
                    0 => self.window += more,
                    id => {
                        let call = call_of(id)?;
                        if let Some(call) = self.calls.get_mut(call) {
                            call.window += more;
                        }
                    }
                }
                (0..self.calls.len()).for_each(|call| self.pass(call));
            }
            RESET => bail!("the control plane reset a stream with code {}", number(0)?),
            GOAWAY => bail!("the control plane sent GOAWAY with code {}", number(4)?),
            _ => {}
        }
        self.content = content;
        Ok(())
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Returns the stream identifier of a call: those of clients are odd.
pub(super) fn id_of(call: usize) -> u32 {
    u32::try_from(2 * call + 1).unwrap_or(u32::MAX)
}

fn call_of(stream: u32) -> anyhow::Result<usize> {
    ensure!(stream % 2 == 1, "a frame belongs to unknown stream {stream}");
    Ok((stream / 2) as usize)
}

fn put_frame(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, content: &[u8]) {
    out.extend_from_slice(&(content.len() as u32).to_be_bytes()[1..]);
    out.extend_from_slice(&[kind, flags]);
    out.extend_from_slice(&stream.to_be_bytes());
    out.extend_from_slice(content);
}

/// Returns the header block of a call: literal fields without indexing and without Huffman code (RFC 7541, section
/// 6.2.2).
pub(super) fn head(form: Form, authority: &str) -> Vec<u8> {
    let method = match form {
        Form::Delta => "DeltaAggregatedResources",
        Form::Sotw => "StreamAggregatedResources",
    };
    let path = format!("/envoy.service.discovery.v3.AggregatedDiscoveryService/{method}");
    // `:method: POST` and `:scheme: http`, from the static table.
    let mut head = vec![0x83, 0x86];
    for (index, name, value) in [
        (4, "", path.as_str()),
        (1, "", authority),
        (0, "content-type", "application/grpc"),
        (0, "te", "trailers"),
    ] {
        head.push(index);
        for text in [name, value].into_iter().filter(|text| !text.is_empty()) {
            // All strings are shorter than 127 bytes.
            head.push(text.len() as u8);
            head.extend_from_slice(text.as_bytes());
        }
    }
    head
}
