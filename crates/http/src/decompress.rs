//! Decompression of bodies (RFC 9110, section 8.4): gzip, Brotli and zstd, bounded against decompression bombs.
//!
//! Source: `envoy.extensions.filters.http.decompressor.v3.Decompressor`.

use std::io::{self, Write};

use bytes::Bytes;
use flate2::write::MultiGzDecoder;
use zstd::stream::write::Decoder as ZstdDecoder;

use crate::head::Headers;

/// Settings of the decompression of bodies.
#[derive(Debug)]
pub struct Decompressor {
    /// Content coding.
    pub coding: DecompressorCoding,
    /// Maximum ratio of the number of decompressed bytes to that of compressed bytes.
    pub max_ratio: u32,
    /// Decompression of requests.
    pub request: Option<Direction>,
    /// Decompression of responses.
    pub response: Option<Direction>,
    /// The coding is added to the request's `accept-encoding`.
    pub advertise: bool,
}

/// A content coding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecompressorCoding {
    /// gzip (RFC 1952).
    Gzip,
    /// Brotli (RFC 7932).
    Brotli,
    /// zstd (RFC 8878).
    Zstd,
}

/// Settings of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Direction {
    /// `cache-control: no-transform` does not prevent decompression.
    pub ignore_no_transform: bool,
}

impl DecompressorCoding {
    /// Returns the name in `content-encoding`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Brotli => "br",
            Self::Zstd => "zstd",
        }
    }
}

/// Base-2 logarithm of zstd's maximum window in bytes. It bounds the memory of a body.
const ZSTD_WINDOW: u32 = 23;

/// Size of Brotli's output buffer in bytes.
const BROTLI_BUFFER: usize = 4096;

/// Number of decompressed bytes that are allowed in any case. The ratio of a short body means little.
const ALWAYS_ALLOWED: u64 = 64 * 1024;

impl Decompressor {
    /// Prepares a head for decompression, and returns the decompression. Returns `None` if the content has another
    /// coding, or must not be transformed.
    pub fn begin(&self, direction: Option<Direction>, head: &mut Headers) -> Option<Decoding> {
        let direction = direction?;
        let coding = head.header("content-encoding")?.trim_ascii();
        if !coding.eq_ignore_ascii_case(self.coding.name().as_bytes())
            || head.header_values("content-encoding").count() > 1
        {
            return None;
        }
        let transforms = head.header_values("cache-control").all(|value| {
            !value
                .split(|byte| *byte == b',')
                .any(|token| token.trim_ascii().eq_ignore_ascii_case(b"no-transform"))
        });
        if !transforms && !direction.ignore_no_transform {
            return None;
        }
        let decoding = Decoding::new(self.coding, self.max_ratio)?;
        head.remove("content-encoding");
        head.remove("content-length");
        Some(decoding)
    }
}

/// A decompression in progress.
pub struct Decoding {
    decoder: CodingDecoder,
    max_ratio: u32,
    /// Number of compressed bytes so far.
    taken: u64,
    /// Number of decompressed bytes so far.
    given: u64,
}

enum CodingDecoder {
    Gzip(Box<MultiGzDecoder<Output>>),
    Brotli(Box<brotli::DecompressorWriter<Output>>),
    Zstd(Box<ZstdDecoder<'static, Output>>),
}

/// Error: the content is not valid, or exceeds the ratio.
#[derive(Debug)]
pub struct Undecodable;

/// Decompressed bytes, up to a limit.
struct Output {
    bytes: Vec<u8>,
    limit: u64,
}

impl Write for Output {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        if (self.bytes.len() + piece.len()) as u64 > self.limit {
            return Err(io::Error::other("the decompressed content exceeds the limit"));
        }
        self.bytes.extend_from_slice(piece);
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Decoding {
    fn new(coding: DecompressorCoding, max_ratio: u32) -> Option<Self> {
        let output = Output { bytes: Vec::new(), limit: 0 };
        let decoder = match coding {
            DecompressorCoding::Gzip => CodingDecoder::Gzip(Box::new(MultiGzDecoder::new(output))),
            DecompressorCoding::Brotli => {
                CodingDecoder::Brotli(Box::new(brotli::DecompressorWriter::new(output, BROTLI_BUFFER)))
            }
            DecompressorCoding::Zstd => {
                // Creation fails only without memory.
                let mut decoder = ZstdDecoder::new(output).ok()?;
                decoder.window_log_max(ZSTD_WINDOW).ok()?;
                CodingDecoder::Zstd(Box::new(decoder))
            }
        };
        Some(Self { decoder, max_ratio, taken: 0, given: 0 })
    }

    /// Decompresses a piece.
    ///
    /// # Errors
    /// The content is not valid, ends early, or exceeds the ratio.
    pub fn piece(&mut self, piece: &[u8], end: bool) -> Result<Bytes, Undecodable> {
        self.taken += piece.len() as u64;
        let max = self.taken.saturating_mul(self.max_ratio.into()).max(ALWAYS_ALLOWED);
        let limit = max.saturating_sub(self.given);
        let bytes = match &mut self.decoder {
            CodingDecoder::Gzip(decoder) => {
                decoder.get_mut().limit = limit;
                decoder.write_all(piece).and_then(|()| decoder.flush()).map_err(|_| Undecodable)?;
                if end && self.taken > 0 {
                    decoder.try_finish().map_err(|_| Undecodable)?;
                }
                std::mem::take(&mut decoder.get_mut().bytes)
            }
            CodingDecoder::Brotli(decoder) => {
                decoder.get_mut().limit = limit;
                decoder.write_all(piece).map_err(|_| Undecodable)?;
                if end && self.taken > 0 {
                    decoder.close().map_err(|_| Undecodable)?;
                } else {
                    decoder.flush().map_err(|_| Undecodable)?;
                }
                std::mem::take(&mut decoder.get_mut().bytes)
            }
            CodingDecoder::Zstd(decoder) => {
                decoder.get_mut().limit = limit;
                decoder.write_all(piece).and_then(|()| decoder.flush()).map_err(|_| Undecodable)?;
                std::mem::take(&mut decoder.get_mut().bytes)
            }
        };
        self.given += bytes.len() as u64;
        Ok(bytes.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::head::ResponseHead;

    const ALL: [DecompressorCoding; 3] =
        [DecompressorCoding::Gzip, DecompressorCoding::Brotli, DecompressorCoding::Zstd];

    fn compressed(coding: DecompressorCoding, content: &[u8]) -> Vec<u8> {
        match coding {
            DecompressorCoding::Gzip => {
                let mut writer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
                writer.write_all(content).unwrap();
                writer.finish().unwrap()
            }
            DecompressorCoding::Brotli => {
                let mut writer = brotli::CompressorWriter::new(Vec::new(), 4096, 9, 20);
                writer.write_all(content).unwrap();
                writer.into_inner()
            }
            DecompressorCoding::Zstd => zstd::encode_all(content, 3).unwrap(),
        }
    }

    fn begin(coding: DecompressorCoding, max_ratio: u32) -> Decoding {
        Decoding::new(coding, max_ratio).unwrap()
    }

    #[test]
    fn content_is_decompressed_in_any_pieces() {
        let content: Vec<u8> =
            (0..200_000_u32).map(|number| (number.wrapping_mul(number) >> 7) as u8).collect();
        for coding in ALL {
            let compressed = compressed(coding, &content);
            for size in [1, 777, usize::MAX] {
                let (mut decoding, mut all) = (begin(coding, 100), Vec::new());
                for piece in compressed.chunks(size.min(compressed.len())) {
                    all.extend_from_slice(&decoding.piece(piece, false).unwrap());
                }
                all.extend_from_slice(&decoding.piece(b"", true).unwrap());
                assert!(all == content, "{coding:?} {size}");
            }
        }
    }

    #[test]
    fn bombs_and_broken_content_are_refused() {
        for coding in ALL {
            let bomb = compressed(coding, &vec![0; 50 << 20]);
            assert!(bomb.len() < 1 << 20, "{coding:?}");
            let mut decoding = begin(coding, 100);
            let outcome = bomb.chunks(4096).map(|piece| decoding.piece(piece, false)).find(Result::is_err);
            assert!(outcome.is_some(), "{coding:?}");
            assert!(begin(coding, 100).piece(b"this is not compressed", true).is_err(), "{coding:?}");
        }
        for coding in [DecompressorCoding::Gzip, DecompressorCoding::Brotli] {
            let whole = compressed(coding, b"some content");
            assert!(begin(coding, 100).piece(&whole[..whole.len() - 2], true).is_err(), "{coding:?}");
        }
    }

    #[test]
    fn heads_select_the_content() {
        let decompressor = Decompressor {
            coding: DecompressorCoding::Gzip,
            max_ratio: 100,
            request: None,
            response: Some(Direction { ignore_no_transform: false }),
            advertise: false,
        };
        let gzip = ("content-encoding", "GZIP");
        let begins = |headers: &[(&str, &str)]| {
            let mut head = ResponseHead::build(200, headers);
            (decompressor.begin(decompressor.response, &mut head).is_some(), head)
        };
        let (begun, head) = begins(&[gzip, ("content-length", "9")]);
        assert!(begun && !head.has("content-length") && !head.has("content-encoding"));
        for left in [&[][..], &[("content-encoding", "br")], &[gzip, ("cache-control", "a, no-transform")]] {
            assert!(!begins(left).0, "{left:?}");
        }
        let mut head = ResponseHead::build(200, &[gzip]);
        assert!(decompressor.begin(decompressor.request, &mut head).is_none());
    }
}
