//! Compression of responses (RFC 9110, section 8.4): gzip, Brotli and zstd, for clients that accept it.
//!
//! Source: `envoy.extensions.filters.http.compressor.v3.Compressor`.

use std::io::Write as _;

use brotli::CompressorWriter;
use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use zstd::stream::{raw::CParameter, write::Encoder};

use crate::head::ResponseHead;

/// Settings of the compression of responses.
#[derive(Debug)]
pub struct Compressor {
    /// Content coding.
    pub coding: Coding,
    /// Media types to compress, in lower case.
    pub content_types: Vec<Box<str>>,
    /// Minimum content length in bytes, if the length is known.
    pub min_length: u64,
    /// Responses with an `etag` are not compressed.
    pub leave_etag: bool,
    /// `accept-encoding` is removed from the request, so that the upstream does not compress.
    pub hide_accept: bool,
    /// This compressor is chosen for clients that accept any coding.
    pub choose_first: bool,
}

/// A content coding and its level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// gzip (RFC 1952), with a level from 1 (fastest) to 9 (smallest).
    Gzip(u32),
    /// Brotli (RFC 7932).
    Brotli {
        /// Level, from 0 (fastest) to 11 (smallest).
        quality: u32,
        /// Base-2 logarithm of the window in bytes, from 10 to 24.
        window_bits: u32,
    },
    /// zstd (RFC 8878), with a level from 1 (fastest) to 22 (smallest).
    Zstd(i32),
}

impl Coding {
    /// Returns the name in `content-encoding`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gzip(_) => "gzip",
            Self::Brotli { .. } => "br",
            Self::Zstd(_) => "zstd",
        }
    }

    fn is_named(self, name: &[u8]) -> bool {
        name.eq_ignore_ascii_case(self.name().as_bytes())
            || (matches!(self, Self::Gzip(_)) && name.eq_ignore_ascii_case(b"x-gzip"))
    }
}

/// Base-2 logarithm of zstd's window in bytes. It bounds the memory of a response; the window of a high level has
/// up to 128 MiB.
const ZSTD_WINDOW: u32 = 18;

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

/// Returns the compressor that `accept-encoding` prefers: the coding with the highest quality, and of several the first
/// in the field. `None` if the client prefers the identity coding or accepts no coding of a compressor. The compressors
/// are in the order of the configuration.
pub fn choose<'a>(accept: &[u8], compressors: &[&'a Compressor]) -> Option<&'a Compressor> {
    let mut choice: (&[u8], f32) = (b"identity", 0.0);
    let pairs = || tokens(accept).filter_map(quality);
    let is_refused = |coding: Coding| pairs().any(|(name, quality)| quality == 0.0 && coding.is_named(name));
    let allowed = || compressors.iter().filter(|one| !is_refused(one.coding));
    for (name, quality) in pairs() {
        let is_known = name == b"*"
            || name.eq_ignore_ascii_case(b"identity")
            || allowed().any(|one| one.coding.is_named(name));
        if is_known && quality > choice.1 {
            choice = (name, quality);
        }
    }
    if choice.0 == b"*" {
        return allowed().find(|one| one.choose_first).or_else(|| allowed().next()).copied();
    }
    allowed().find(|one| one.coding.is_named(choice.0)).copied()
}

/// Returns the name and the quality of an element of `accept-encoding`; `None` if the quality is invalid.
fn quality(coding: &[u8]) -> Option<(&[u8], f32)> {
    let mut parts = coding.split(|byte| *byte == b';').map(<[u8]>::trim_ascii);
    let name = parts.next().unwrap_or_default();
    let quality = parts.find_map(|part| part.strip_prefix(b"q=").or_else(|| part.strip_prefix(b"Q=")));
    let quality = quality.map_or(Some(1.0), |text| std::str::from_utf8(text).ok()?.parse::<f32>().ok());
    quality.filter(|quality| (0.0..=1.0).contains(quality)).map(|quality| (name, quality))
}

impl Compressor {
    /// Prepares the head of a response and returns the encoder of its content; `None` if the content is not to be
    /// compressed. If it would be compressed for other clients, `vary` is set, so that caches tell the clients apart.
    /// `length` is the length of the content, if known; `accepted` is whether the client accepts the coding.
    pub fn begin(&self, head: &mut ResponseHead, length: Option<u64>, accepted: bool) -> Option<Encoding> {
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
        let encoding = Encoding::new(self.coding)?;
        head.remove("content-length");
        head.remove("accept-ranges");
        head.set("content-encoding", self.coding.name().as_bytes());
        // A strong validator would refer to the uncompressed bytes.
        if head.header("etag").is_some_and(|etag| !etag.starts_with(b"W/")) {
            head.remove("etag");
        }
        Some(encoding)
    }
}

/// A compressed stream in progress.
pub enum Encoding {
    /// gzip.
    Gzip(GzEncoder<Vec<u8>>),
    /// Brotli; `None` after the end.
    Brotli(Option<Box<CompressorWriter<Vec<u8>>>>),
    /// zstd.
    Zstd(Encoder<'static, Vec<u8>>),
}

/// Size of Brotli's output buffer in bytes.
const BROTLI_BUFFER: usize = 4096;

impl Encoding {
    fn new(coding: Coding) -> Option<Self> {
        Some(match coding {
            Coding::Gzip(level) => Self::Gzip(GzEncoder::new(Vec::new(), Compression::new(level))),
            Coding::Brotli { quality, window_bits } => {
                let writer = CompressorWriter::new(Vec::new(), BROTLI_BUFFER, quality, window_bits);
                Self::Brotli(Some(Box::new(writer)))
            }
            Coding::Zstd(level) => {
                // Creation fails only without memory.
                let mut encoder = Encoder::new(Vec::new(), level).ok()?;
                encoder.set_parameter(CParameter::WindowLog(ZSTD_WINDOW)).ok()?;
                Self::Zstd(encoder)
            }
        })
    }

    /// Compresses a piece. The result is flushed at once, as in Envoy, because the client may wait for it.
    pub fn piece(&mut self, piece: &[u8], end: bool) -> Bytes {
        // Writing into memory cannot fail.
        match self {
            Self::Gzip(gzip) => {
                _ = gzip.write_all(piece);
                _ = if end { gzip.try_finish() } else { gzip.flush() };
                std::mem::take(gzip.get_mut()).into()
            }
            Self::Brotli(brotli) => {
                let Some(mut writer) = brotli.take() else { return Bytes::new() };
                _ = writer.write_all(piece);
                if end {
                    return writer.into_inner().into();
                }
                _ = writer.flush();
                let out = std::mem::take(writer.get_mut());
                *brotli = Some(writer);
                out.into()
            }
            Self::Zstd(zstd) => {
                _ = zstd.write_all(piece);
                _ = if end { zstd.do_finish() } else { zstd.flush() };
                std::mem::take(zstd.get_mut()).into()
            }
        }
    }
}

/// Returns the elements of a list field.
fn tokens(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compressor() -> Compressor {
        Compressor {
            coding: Coding::Gzip(6),
            content_types: vec!["text/plain".into()],
            min_length: 30,
            leave_etag: false,
            hide_accept: false,
            choose_first: false,
        }
    }

    #[test]
    fn accept_encoding_is_evaluated() {
        let [mut gzip, mut brotli, mut zstd] = [(); 3].map(|()| compressor());
        brotli.coding = Coding::Brotli { quality: 3, window_bits: 18 };
        zstd.coding = Coding::Zstd(3);
        gzip.choose_first = true;
        let name = |accept: &str, compressors: &[&Compressor]| {
            choose(accept.as_bytes(), compressors).map_or("", |one| one.coding.name())
        };
        for good in
            ["gzip", "deflate, GZIP;q=0.5", "br, *", "identity;q=0.5, gzip", "x-gzip", "gzip, identity"]
        {
            assert_eq!(name(good, &[&gzip]), "gzip", "{good}");
        }
        for bad in [
            "",
            "br",
            "gzip;q=0",
            "*;q=0",
            "gzip;q=0.2, identity",
            "identity, gzip",
            "gzip;q=2",
            "*, gzip;q=0",
            "gzipped",
        ] {
            assert_eq!(name(bad, &[&gzip]), "", "{bad}");
        }
        let all = [&brotli, &gzip, &zstd];
        for (accept, expected) in [
            ("zstd, br, gzip", "zstd"),
            ("gzip;q=0.5, br;q=0.9, zstd;q=0.8", "br"),
            ("*", "gzip"),
            ("*, gzip;q=0", "br"),
            ("br;q=0, *;q=0.1", "gzip"),
            ("deflate", ""),
        ] {
            assert_eq!(name(accept, &all), expected, "{accept}");
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

    /// Returns the longest content that a client reads from the bytes so far.
    fn decompressed(coding: Coding, bytes: &[u8]) -> Vec<u8> {
        let mut reader: Box<dyn std::io::Read> = match coding {
            Coding::Gzip(_) => Box::new(flate2::read::GzDecoder::new(bytes)),
            Coding::Brotli { .. } => Box::new(brotli::Decompressor::new(bytes, 4096)),
            Coding::Zstd(_) => Box::new(zstd::stream::read::Decoder::new(bytes).unwrap()),
        };
        let (mut all, mut block) = (Vec::new(), [0; 64]);
        while let Ok(count @ 1..) = reader.read(&mut block) {
            all.extend_from_slice(&block[..count]);
        }
        all
    }

    #[test]
    fn every_piece_is_flushed() {
        for coding in [Coding::Gzip(6), Coding::Brotli { quality: 3, window_bits: 18 }, Coding::Zstd(3)] {
            let compressor = Compressor { coding, ..compressor() };
            let mut head = ResponseHead::build(200, &[("content-type", "text/plain")]);
            let mut encoding = compressor.begin(&mut head, None, true).unwrap();
            assert_eq!(head.header("content-encoding"), Some(coding.name().as_bytes()));
            let mut all = encoding.piece(b"first ", false).to_vec();
            assert_eq!(decompressed(coding, &all), b"first ", "{coding:?}");
            let long = vec![b'x'; 100_000];
            all.extend(encoding.piece(&long, false));
            all.extend(encoding.piece(b"last", true));
            assert_eq!(decompressed(coding, &all), [b"first ", &long[..], b"last"].concat(), "{coding:?}");
            assert!(all.len() < 2000, "{coding:?}: {}", all.len());
        }
    }
}
