//! Compression of responses (RFC 9110, section 8.4): gzip, for clients that accept it.
//!
//! Source: `envoy.extensions.filters.http.compressor.v3.Compressor`.

use std::io::Write as _;

use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};

use crate::head::{RequestHead, ResponseHead};

/// Settings of the compression of responses.
#[derive(Debug)]
pub struct Compressor {
    /// Media types to compress, in lower case.
    pub content_types: Vec<Box<str>>,
    /// Minimum content length in bytes, if the length is known.
    pub min_length: u64,
    /// Responses with an `etag` are not compressed.
    pub leave_etag: bool,
    /// `accept-encoding` is removed from the request, so that the upstream does not compress.
    pub hide_accept: bool,
    /// Compression level, from 1 (fastest) to 9 (smallest).
    pub level: u32,
}

/// Media types to compress if the configuration names none, as in Envoy.
pub const CONTENT_TYPES: [&str; 10] = [
    "application/javascript",
    "application/json",
    "application/xhtml+xml",
    "image/svg+xml",
    "text/css",
    "text/html",
    "text/plain",
    "text/xml",
    "application/wasm",
    "application/xml",
];

impl Compressor {
    /// Returns whether the client accepts a compressed response.
    pub fn is_accepted(&self, head: &mut RequestHead) -> bool {
        let accepted = accepts_gzip(head.header("accept-encoding").unwrap_or_default());
        if self.hide_accept {
            head.remove("accept-encoding");
        }
        accepted
    }

    /// Prepares the head of a compressed response, and returns the compressor. Returns `None` if the content is not to
    /// be compressed. If only the client's acceptance is missing, `vary` is set for caches. `length` is the length of
    /// the content, if known.
    pub fn begin(&self, head: &mut ResponseHead, length: Option<u64>, accepted: bool) -> Option<Gzip> {
        let media_type = head.header("content-type").unwrap_or_default();
        let media_type = media_type.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
        let is_wanted =
            self.content_types.iter().any(|wanted| media_type.eq_ignore_ascii_case(wanted.as_bytes()));
        let transforms = !tokens(head.header("cache-control").unwrap_or_default())
            .any(|token| token.eq_ignore_ascii_case(b"no-transform"));
        let has_etag = head.has("etag");
        if !is_wanted
            || !transforms
            || length.is_some_and(|length| length < self.min_length)
            || head.has("content-encoding")
            // A compressed part is no part of the compressed content.
            || head.status() == 206
            || (has_etag && self.leave_etag)
        {
            return None;
        }
        let varies = tokens(head.header("vary").unwrap_or_default())
            .any(|token| token == b"*" || token.eq_ignore_ascii_case(b"accept-encoding"));
        if !varies {
            head.append("vary", b"Accept-Encoding");
        }
        if !accepted {
            return None;
        }
        head.remove("content-length");
        head.remove("accept-ranges");
        head.set("content-encoding", b"gzip");
        // A strong validator would refer to the uncompressed bytes.
        if head.header("etag").is_some_and(|etag| !etag.starts_with(b"W/")) {
            head.remove("etag");
        }
        Some(Gzip(GzEncoder::new(Vec::new(), Compression::new(self.level))))
    }
}

/// A gzip stream in progress.
pub struct Gzip(GzEncoder<Vec<u8>>);

impl Gzip {
    /// Compresses a piece. The result is flushed at once, as in Envoy, because the client may wait for it.
    pub fn piece(&mut self, piece: &[u8], end: bool) -> Bytes {
        // Writing into memory cannot fail.
        let _ = self.0.write_all(piece);
        let _ = if end { self.0.try_finish() } else { self.0.flush() };
        std::mem::take(self.0.get_mut()).into()
    }
}

/// Returns the elements of a list field.
fn tokens(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii)
}

/// Returns whether `accept-encoding` accepts gzip, and prefers it to the identity coding.
fn accepts_gzip(value: &[u8]) -> bool {
    let (mut gzip, mut any, mut identity) = (None, None, None);
    for coding in tokens(value) {
        let mut parts = coding.split(|byte| *byte == b';').map(<[u8]>::trim_ascii);
        let name = parts.next().unwrap_or_default();
        let quality = parts.find_map(|part| part.strip_prefix(b"q=").or_else(|| part.strip_prefix(b"Q=")));
        let quality = quality.map_or(Some(1.0), |text| std::str::from_utf8(text).ok()?.parse::<f32>().ok());
        let quality = quality.filter(|quality| (0.0..=1.0).contains(quality)).unwrap_or(0.0);
        match name {
            _ if name.eq_ignore_ascii_case(b"gzip") || name.eq_ignore_ascii_case(b"x-gzip") => {
                gzip = Some(quality);
            }
            b"*" => any = Some(quality),
            _ if name.eq_ignore_ascii_case(b"identity") => identity = Some(quality),
            _ => {}
        }
    }
    let gzip = gzip.or(any).unwrap_or(0.0);
    gzip > 0.0 && identity.is_none_or(|identity| gzip >= identity)
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    fn compressor() -> Compressor {
        Compressor {
            content_types: vec!["text/plain".into()],
            min_length: 30,
            leave_etag: false,
            hide_accept: false,
            level: 6,
        }
    }

    #[test]
    fn accept_encoding_is_evaluated() {
        for good in ["gzip", "deflate, GZIP;q=0.5", "br, *", "identity;q=0.5, gzip", "x-gzip"] {
            assert!(accepts_gzip(good.as_bytes()), "{good}");
        }
        for bad in
            ["", "br", "gzip;q=0", "*;q=0", "gzip;q=0.2, identity", "gzip;q=2", "*, gzip;q=0", "gzipped"]
        {
            assert!(!accepts_gzip(bad.as_bytes()), "{bad}");
        }
    }

    #[test]
    fn heads_of_compressed_responses_are_adapted() {
        let begin = |headers: &[(&str, &str)], length| {
            let mut head = ResponseHead::build(200, headers);
            let begun = compressor().begin(&mut head, length, true).is_some();
            (begun, head)
        };
        let text = ("content-type", "text/plain; version=0.0.4");
        let (begun, head) =
            begin(&[text, ("content-length", "99"), ("etag", "\"a\""), ("vary", "Origin")], Some(99));
        assert!(begun && !head.has("content-length") && !head.has("etag"));
        assert_eq!(head.header("content-encoding"), Some(&b"gzip"[..]));
        assert!(begin(&[text, ("etag", "W/\"a\"")], None).1.has("etag"));
        for left in [
            &[text, ("content-encoding", "br")][..],
            &[text, ("cache-control", "private, no-transform")],
            &[("content-type", "image/png")],
            &[],
        ] {
            let (begun, head) = begin(left, None);
            assert!(!begun && !head.has("vary"), "{left:?}");
        }
        assert!(!begin(&[text], Some(29)).0);
        let mut head = ResponseHead::build(200, &[text]);
        assert!(compressor().begin(&mut head, None, false).is_none());
        assert!(head.has("vary") && !head.has("content-encoding"), "caches must know");
    }

    #[test]
    fn every_piece_is_flushed() {
        let mut gzip = compressor()
            .begin(&mut ResponseHead::build(200, &[("content-type", "text/plain")]), None, true)
            .unwrap();
        let mut all = gzip.piece(b"first ", false).to_vec();
        let mut read = [0; 6];
        flate2::read::GzDecoder::new(&*all).read_exact(&mut read).unwrap();
        assert_eq!(&read, b"first ");
        all.extend(gzip.piece(b"", true));
        let mut text = String::new();
        flate2::read::GzDecoder::new(&*all).read_to_string(&mut text).unwrap();
        assert_eq!(text, "first ");
    }
}
