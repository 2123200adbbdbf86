//! Frames: headers, simple payloads and their encoding (RFC 9113, sections 4 and 6).

use std::fmt;

use crate::buffer::Buffer;

/// Preface of a client's connection.
pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Length of a frame header in bytes.
pub(super) const HEAD: usize = 9;
/// Maximum payload in bytes that this side accepts: the initial value of SETTINGS_MAX_FRAME_SIZE, which every peer
/// accepts too.
pub(super) const MAX_FRAME: usize = 16 * 1024;
/// Maximum flow control window in bytes (section 6.9.1).
pub(super) const MAX_WINDOW: i64 = (1 << 31) - 1;
/// Flow control windows in bytes before any settings (section 6.9.2).
pub(super) const FIRST_WINDOW: i64 = 65_535;

pub(super) const END_STREAM: u8 = 0x1;
pub(super) const ACK: u8 = 0x1;
pub(super) const END_HEADERS: u8 = 0x4;
pub(super) const PADDED: u8 = 0x8;
pub(super) const PRIORITY: u8 = 0x20;

/// Type of a frame (RFC 9113, section 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each is the frame type of that name")]
pub enum FrameKind {
    Data,
    Headers,
    Priority,
    Reset,
    Settings,
    PushPromise,
    Ping,
    GoAway,
    WindowUpdate,
    Continuation,
    /// An unknown type, which is ignored.
    Unknown,
}

/// A frame header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub length: usize,
    pub kind: FrameKind,
    pub flags: u8,
    pub stream: u32,
}

impl Head {
    /// Parses a frame header; returns `None` if it is incomplete.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let [a, b, c, kind, flags, stream @ ..] = bytes.first_chunk::<HEAD>()?;
        let kind = match kind {
            0 => FrameKind::Data,
            1 => FrameKind::Headers,
            2 => FrameKind::Priority,
            3 => FrameKind::Reset,
            4 => FrameKind::Settings,
            5 => FrameKind::PushPromise,
            6 => FrameKind::Ping,
            7 => FrameKind::GoAway,
            8 => FrameKind::WindowUpdate,
            9 => FrameKind::Continuation,
            _ => FrameKind::Unknown,
        };
        Some(Self {
            length: u32::from_be_bytes([0, *a, *b, *c]) as usize,
            kind,
            flags: *flags,
            stream: u32::from_be_bytes(*stream) & 0x7fff_ffff,
        })
    }

    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// Writes a frame header.
pub(super) fn head(out: &mut Buffer, kind: FrameKind, flags: u8, stream: u32, length: usize) {
    let [_, a, b, c] = (length as u32).to_be_bytes();
    let [d, e, f, g] = stream.to_be_bytes();
    out.extend(&[a, b, c, kind as u8, flags, d, e, f, g]);
}

/// Sets the payload length in the frame header at the start of `frame`.
pub(super) fn set_length(frame: &mut [u8], length: usize) {
    let [_, a, b, c] = (length as u32).to_be_bytes();
    frame[..3].copy_from_slice(&[a, b, c]);
}

/// Writes a header block, in as many frames as needed.
pub(super) fn headers(out: &mut Buffer, stream: u32, end: bool, mut block: &[u8], max_frame: usize) {
    let (mut kind, mut flags) = (FrameKind::Headers, if end { END_STREAM } else { 0 });
    loop {
        let (piece, rest) = block.split_at(block.len().min(max_frame));
        flags |= if rest.is_empty() { END_HEADERS } else { 0 };
        head(out, kind, flags, stream, piece.len());
        out.extend(piece);
        if rest.is_empty() {
            return;
        }
        (block, kind, flags) = (rest, FrameKind::Continuation, 0);
    }
}

/// Writes a SETTINGS frame with pairs of identifier and value.
pub(super) fn settings(out: &mut Buffer, settings: &[(u16, u32)]) {
    head(out, FrameKind::Settings, 0, 0, settings.len() * 6);
    for (id, value) in settings {
        out.extend(&id.to_be_bytes());
        out.extend(&value.to_be_bytes());
    }
}

pub(super) fn window_update(out: &mut Buffer, stream: u32, count: u32) {
    head(out, FrameKind::WindowUpdate, 0, stream, 4);
    out.extend(&count.to_be_bytes());
}

pub(super) fn reset(out: &mut Buffer, stream: u32, reason: Reason) {
    head(out, FrameKind::Reset, 0, stream, 4);
    out.extend(&reason.0.to_be_bytes());
}

pub(super) fn ping(out: &mut Buffer, flags: u8, content: [u8; 8]) {
    head(out, FrameKind::Ping, flags, 0, 8);
    out.extend(&content);
}

pub(super) fn go_away(out: &mut Buffer, last: u32, reason: Reason) {
    head(out, FrameKind::GoAway, 0, 0, 8);
    out.extend(&last.to_be_bytes());
    out.extend(&reason.0.to_be_bytes());
}

/// Returns a payload without padding and priority (sections 6.1 and 6.2).
pub(super) fn content<'a>(frame: &Head, payload: &'a [u8]) -> Result<&'a [u8], Reason> {
    let mut payload = payload;
    if frame.has(PADDED) {
        let (padding, rest) = payload.split_first().ok_or(Reason::FRAME_SIZE)?;
        let length = rest.len().checked_sub(usize::from(*padding)).ok_or(Reason::PROTOCOL)?;
        payload = rest.get(..length).unwrap_or_default();
    }
    if frame.kind == FrameKind::Headers && frame.has(PRIORITY) {
        let (priority, rest) = payload.split_at_checked(5).ok_or(Reason::FRAME_SIZE)?;
        // A stream cannot depend on itself.
        if number(priority)? & 0x7fff_ffff == frame.stream {
            return Err(Reason::PROTOCOL);
        }
        payload = rest;
    }
    Ok(payload)
}

/// Returns the number at the start of a payload.
pub(super) fn number(payload: &[u8]) -> Result<u32, Reason> {
    payload.first_chunk().map(|bytes| u32::from_be_bytes(*bytes)).ok_or(Reason::FRAME_SIZE)
}

/// Returns the settings in a payload.
pub(super) fn each_setting(payload: &[u8]) -> impl Iterator<Item = (u16, u32)> {
    payload.chunks_exact(6).filter_map(|setting| {
        let (id, value) = setting.split_first_chunk::<2>()?;
        Some((u16::from_be_bytes(*id), u32::from_be_bytes(*value.first_chunk()?)))
    })
}

/// Error code of a stream or connection (RFC 9113, section 7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reason(pub u32);

#[expect(missing_docs, reason = "each is the error code of that name")]
impl Reason {
    pub const NONE: Self = Self(0);
    pub const PROTOCOL: Self = Self(1);
    pub const INTERNAL: Self = Self(2);
    pub const FLOW_CONTROL: Self = Self(3);
    pub const STREAM_CLOSED: Self = Self(5);
    pub const FRAME_SIZE: Self = Self(6);
    pub const REFUSED: Self = Self(7);
    pub const CANCEL: Self = Self(8);
    pub const COMPRESSION: Self = Self(9);
    pub const ENHANCE_YOUR_CALM: Self = Self(11);
}

/// Writes the name in the RFC.
impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [&str; 14] = [
            "NO_ERROR",
            "PROTOCOL_ERROR",
            "INTERNAL_ERROR",
            "FLOW_CONTROL_ERROR",
            "SETTINGS_TIMEOUT",
            "STREAM_CLOSED",
            "FRAME_SIZE_ERROR",
            "REFUSED_STREAM",
            "CANCEL",
            "COMPRESSION_ERROR",
            "CONNECT_ERROR",
            "ENHANCE_YOUR_CALM",
            "INADEQUATE_SECURITY",
            "HTTP_1_1_REQUIRED",
        ];
        match NAMES.get(self.0 as usize) {
            Some(name) => f.write_str(name),
            None => write!(f, "error {}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_frame_headers_are_parsed() {
        let mut out = Buffer::default();
        head(&mut out, FrameKind::Headers, END_HEADERS | PADDED, 0x7fff_fffb, 0x12_34_56);
        let read = Head::read(out.bytes()).unwrap();
        assert_eq!((read.length, read.kind, read.stream), (0x12_34_56, FrameKind::Headers, 0x7fff_fffb));
        assert!(read.has(PADDED) && read.has(END_HEADERS) && !read.has(END_STREAM));
        assert_eq!(Head::read(&out.bytes()[..8]), None);
        assert_eq!(Head::read(&[0, 0, 0, 99, 0, 0xff, 0, 0, 1]).unwrap().kind, FrameKind::Unknown);
        assert_eq!(Head::read(&[0, 0, 0, 0, 0, 0x80, 0, 0, 1]).unwrap().stream, 1);
    }

    #[test]
    fn padding_and_priority_are_removed() {
        let frame = |kind, flags| Head { length: 0, kind, flags, stream: 3 };
        let padded = frame(FrameKind::Data, PADDED);
        assert_eq!(content(&padded, b"\x02abcde").unwrap(), b"abc");
        assert_eq!(content(&padded, b"\x05abcde").unwrap(), b"");
        assert_eq!(content(&padded, b"\x06abcde"), Err(Reason::PROTOCOL));
        assert_eq!(content(&padded, b""), Err(Reason::FRAME_SIZE));
        let both = frame(FrameKind::Headers, PADDED | PRIORITY);
        assert_eq!(content(&both, b"\x01\0\0\0\x01\x10abx").unwrap(), b"ab");
        assert_eq!(content(&both, b"\x01\0\0\0\x03\x10abx"), Err(Reason::PROTOCOL));
        assert_eq!(content(&both, b"\x01\0\0\0x"), Err(Reason::FRAME_SIZE));
    }

    #[test]
    fn a_long_block_is_split_into_frames() {
        let mut out = Buffer::default();
        headers(&mut out, 1, true, &[7; 25], 10);
        let mut rest = out.bytes();
        let mut frames = Vec::new();
        while let Some(head) = Head::read(rest) {
            frames.push((head.kind, head.flags, head.length));
            rest = &rest[HEAD + head.length..];
        }
        let expected = [
            (FrameKind::Headers, END_STREAM, 10),
            (FrameKind::Continuation, 0, 10),
            (FrameKind::Continuation, END_HEADERS, 5),
        ];
        assert_eq!(frames, expected);
    }
}
