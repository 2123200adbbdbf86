//! gRPC-Web: gRPC for clients that can neither send nor receive trailers, such as browsers. Its messages are those of
//! gRPC, in binary or base64. Trailers are an additional message at the end of the content.
//! Source: <https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-WEB.md>, filter `envoy.filters.http.grpc_web`.

use base64::{Engine as _, prelude::BASE64_STANDARD as BASE64};
use bytes::Bytes;

use crate::{
    compress::Encoding,
    decompress::Decoding,
    grpc_status,
    head::{Headers, RequestHead, ResponseHead},
};

/// Encodings of a gRPC-Web call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WebCall {
    /// The request's content is base64.
    pub text: bool,
    /// The client accepts base64 in the response.
    wants_text: bool,
}

const WEB: &[u8] = b"application/grpc-web";
const TEXT: &[u8] = b"application/grpc-web-text";
const GRPC: &[u8] = b"application/grpc";

/// Returns whether a content type has this name, with messages in protobuf.
fn is(content_type: &[u8], name: &[u8]) -> bool {
    matches!(content_type.strip_prefix(name), Some(b"" | b"+proto"))
}

/// Returns whether a request is a gRPC-Web call.
pub fn is_call(head: &RequestHead) -> bool {
    let content_type = head.header("content-type").unwrap_or_default();
    is(content_type, TEXT) || is(content_type, WEB)
}

/// Turns a gRPC-Web call into a gRPC call; returns `None` if it is no gRPC-Web call.
pub fn request(head: &mut RequestHead) -> Option<WebCall> {
    let content_type = head.header("content-type").unwrap_or_default();
    let text = is(content_type, TEXT);
    if !text && !is(content_type, WEB) {
        return None;
    }
    let wants_text = head.header("accept").is_some_and(|accept| is(accept, TEXT));
    head.set("content-type", GRPC);
    // The length was that of the encoded content on the previous hop.
    head.remove("content-length");
    head.set("te", b"trailers");
    head.set("grpc-accept-encoding", b"identity");
    Some(WebCall { text, wants_text })
}

impl WebCall {
    /// Turns the head of a response into gRPC-Web, and returns the conversion of its content. Returns `None` if the
    /// content is not gRPC. That is an error, and the caller sends no content.
    pub fn answer(self, head: &mut ResponseHead) -> Option<Conversion> {
        let grpc = is(head.header("content-type").unwrap_or_default(), GRPC);
        head.set("content-type", &[if self.wants_text { TEXT } else { WEB }, b"+proto"].concat());
        head.remove("content-length");
        if !grpc && !head.has("grpc-status") {
            let status = grpc_status::from_http(head.status());
            head.set_number("grpc-status", status.into());
        }
        grpc.then_some(Conversion::Out { text: self.wants_text, trailers: None })
    }
}

/// Conversion of content in transit.
pub enum Conversion {
    /// Decodes base64, which may have padding anywhere. Holds up to three characters that are no quad yet.
    In(Vec<u8>),
    /// Encodes base64 if the client wants it, and appends the trailers as a message.
    Out {
        /// The client wants base64.
        text: bool,
        /// Trailers that were appended.
        trailers: Option<Headers>,
    },
    /// Compresses.
    Compress(Encoding),
    /// Decompresses.
    Decompress(Box<Decoding>),
    /// Two conversions, one after the other.
    Then(Box<[Self; 2]>),
}

/// Error: the content is not valid base64, or not valid in its coding.
#[derive(Debug)]
pub struct InvalidContent;

impl Conversion {
    /// Converts a piece of content; at the end also the trailers (`following`).
    pub fn piece(
        &mut self,
        piece: Bytes,
        end: bool,
        following: &mut Option<Headers>,
    ) -> Result<Bytes, InvalidContent> {
        match self {
            Self::In(rest) => {
                rest.extend_from_slice(&piece);
                let whole = rest.len() / 4 * 4;
                let mut out = Vec::with_capacity(whole / 4 * 3);
                // Padding ends a run of quads, not the content.
                for run in rest[..whole].split_inclusive_quads() {
                    BASE64.decode_vec(run, &mut out).map_err(|_| InvalidContent)?;
                }
                rest.drain(..whole);
                if end && !rest.is_empty() { Err(InvalidContent) } else { Ok(out.into()) }
            }
            Self::Out { text, trailers } => {
                let mut out = piece;
                if let Some(last) = following.take().filter(|_| end) {
                    out = [&*out, &message(&last)].concat().into();
                    *trailers = Some(last);
                }
                Ok(if *text && !out.is_empty() { BASE64.encode(&out).into() } else { out })
            }
            Self::Compress(encoding) => Ok(encoding.piece(&piece, end)),
            Self::Decompress(decoding) => decoding.piece(&piece, end).map_err(|_| InvalidContent),
            Self::Then(both) => {
                let [first, second] = &mut **both;
                let piece = first.piece(piece, end, following)?;
                if piece.is_empty() && !end {
                    return Ok(piece);
                }
                second.piece(piece, end, following)
            }
        }
    }

    /// Returns the trailers that were appended to the content.
    pub fn trailers(&self) -> Option<&Headers> {
        match self {
            Self::In(_) | Self::Compress(_) | Self::Decompress(_) => None,
            Self::Then(both) => both[1].trailers(),
            Self::Out { trailers, .. } => trailers.as_ref(),
        }
    }
}

/// Splits into runs of quads; a run ends at padding or at the end.
trait Quads {
    fn split_inclusive_quads(&self) -> impl Iterator<Item = &[u8]>;
}

impl Quads for [u8] {
    fn split_inclusive_quads(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = self;
        std::iter::from_fn(move || {
            let quads = rest.chunks_exact(4).position(|quad| quad[3] == b'=').map(|at| at + 1);
            let (run, after) = rest.split_at(quads.map_or(rest.len(), |quads| quads * 4));
            rest = after;
            (!run.is_empty()).then_some(run)
        })
    }
}

/// Encodes trailers as a message. The first bit marks it as trailers.
fn message(trailers: &Headers) -> Vec<u8> {
    let mut out = vec![0x80, 0, 0, 0, 0];
    for (name, value) in trailers.iter() {
        for part in [name, b":", value, b"\r\n"] {
            out.extend_from_slice(part);
        }
    }
    let length = u32::try_from(out.len() - 5).unwrap_or(u32::MAX);
    out[1..5].copy_from_slice(&length.to_be_bytes());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_detected_by_content_type() {
        let call = |content_type, accept| {
            let headers = [("content-type", content_type), ("accept", accept), ("content-length", "5")];
            let mut head = RequestHead::build("POST", "/a/b", "a", &headers);
            let web = request(&mut head);
            (web.map(|web| (web.text, web.wants_text)), head)
        };
        let (web, head) = call("application/grpc-web+proto", "application/grpc-web-text");
        assert_eq!((web, head.header("content-type")), (Some((false, true)), Some(GRPC)));
        assert_eq!((head.header("te"), head.has("content-length")), (Some(&b"trailers"[..]), false));
        assert_eq!(call("application/grpc-web-text", "*/*").0, Some((true, false)));
        for other in
            ["application/grpc", "application/grpc-webx", "application/grpc-web+json", "text/plain", ""]
        {
            assert_eq!(call(other, "").0, None, "{other}");
        }
        let mut plain = ResponseHead::build(503, &[("content-type", "text/plain")]);
        assert!(WebCall { text: false, wants_text: true }.answer(&mut plain).is_none());
        let fields = (plain.header("content-type"), plain.header("grpc-status"));
        assert_eq!(fields, (Some(&b"application/grpc-web-text+proto"[..]), Some(&b"14"[..])));
    }

    #[test]
    fn base64_is_decoded_in_any_pieces_with_padding_anywhere() {
        let text = [BASE64.encode("hello"), BASE64.encode("abcd"), BASE64.encode("xyz")].concat();
        for size in 1..text.len() {
            let (mut through, mut out) = (Conversion::In(Vec::new()), Vec::new());
            let mut pieces = text.as_bytes().chunks(size).peekable();
            while let Some(piece) = pieces.next() {
                let end = pieces.peek().is_none();
                out.extend(through.piece(Bytes::copy_from_slice(piece), end, &mut None).unwrap());
            }
            assert_eq!(out, b"helloabcdxyz", "{size}");
        }
        for wrong in ["a", "abc", "a=bc", "????", "YQ==YQ"] {
            let piece = Conversion::In(Vec::new()).piece(wrong.into(), true, &mut None);
            assert!(piece.is_err(), "{wrong}");
        }
    }

    #[test]
    fn trailers_become_the_last_message() {
        let mut trailers = Headers::default();
        trailers.append("grpc-status", b"0");
        let expected = b"data\x80\0\0\0\x0fgrpc-status:0\r\n";
        let mut through = Conversion::Out { text: false, trailers: None };
        assert_eq!(through.piece("data".into(), false, &mut None).unwrap(), "data");
        let last = through.piece(Bytes::new(), true, &mut Some(trailers.clone())).unwrap();
        assert_eq!(last, expected[4..]);
        assert!(through.trailers().unwrap().has("grpc-status"));
        let mut through = Conversion::Out { text: true, trailers: None };
        let last = through.piece("data".into(), true, &mut Some(trailers)).unwrap();
        assert_eq!(BASE64.decode(last).unwrap(), expected);
    }
}
