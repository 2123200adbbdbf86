//! Access to private codecs for fuzz targets. Only the feature `fuzzing` builds it; release builds do not enable it.

use std::task::{Context, Waker};

use super::{
    Bounds, Http2Options, Role, SessionLimits,
    hpack::{Decoder, Encoder},
    session::Session,
};
use crate::buffer::Buffer;

/// Decodes the header blocks of one connection, each after its length in two bytes, up to the first malformed one.
/// Returns their fields, and the fields that result when these are encoded and decoded again.
pub fn hpack(data: &[u8]) -> [Fields; 2] {
    let (mut decoder, mut encoder, mut next) = (Decoder::new(), Encoder::new(), Decoder::new());
    let (mut all, mut again) = (Vec::new(), Vec::new());
    let mut rest = data;
    while let Some((length, after)) = rest.split_first_chunk() {
        let (block, after) = after.split_at(after.len().min(usize::from(u16::from_be_bytes(*length))));
        let mut out = Vec::new();
        encoder.begin(&mut out);
        let read = decoder.decode(block, |name, value| {
            all.push((name.to_vec(), value.to_vec()));
            encoder.field(&mut out, name, value);
        });
        let reread = next.decode(&out, |name, value| again.push((name.to_vec(), value.to_vec())));
        if reread.is_err() || read.is_err() {
            break;
        }
        rest = after;
    }
    [all, again]
}

/// Names and values.
pub type Fields = Vec<(Vec<u8>, Vec<u8>)>;

/// Feeds a peer's bytes to an HTTP/2 connection in pieces of this size. Returns whether the connection is still open,
/// the bytes that it sends, and the requests.
pub fn http2(server: bool, data: &[u8], piece: usize) -> (bool, Vec<u8>, String) {
    let options = Http2Options { allow_connect: true, ..Http2Options::new(4) };
    let limits = SessionLimits { head: Bounds { size: 4096, fields: 20 }, options };
    let role = if server { Role::Server } else { Role::Client };
    let mut session = Session::new(role, limits);
    let mut input = Buffer::default();
    let mut is_open = true;
    for bytes in data.chunks(piece.max(1)) {
        input.extend(bytes);
        if let Err(reason) = session.feed(&mut input) {
            session.fail(reason);
            is_open = false;
            break;
        }
    }
    let mut requests = String::new();
    let cx = Context::from_waker(Waker::noop());
    while let Some(request) = session.accept() {
        let content = session.poll_piece(&cx, request.stream);
        requests += &format!("{:?} {:?} {content:?}\n", request.stream, request.head);
        session.forget(request.stream);
    }
    (is_open, session.out.bytes().to_vec(), requests)
}
