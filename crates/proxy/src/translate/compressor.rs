//! Translates response compression. Source: `envoy.extensions.filters.http.compressor.v3.Compressor`.

use skysail_xds::envoy::pb::envoy::extensions::{
    compression::gzip::compressor::v3::{Gzip, gzip::CompressionLevel},
    filters::http::compressor::v3::Compressor as Proto,
};

use super::{At as _, Reject, Result, number, type_name, unknown_type, unpack};
use skysail_http::compress::{CONTENT_TYPES, Compressor};

/// Minimum content length in bytes; shorter responses are not compressed.
const MIN_LENGTH: u32 = 30;
/// Envoy's default compression level, which is zlib's.
const LEVEL: u32 = 6;

/// Translates the filter. Returns `None` for algorithms without support: a client need not accept them, so it
/// gets uncompressed responses.
#[expect(deprecated, reason = "Istio still sends content_type")]
pub(super) fn translate(proto: &Proto) -> Result<Option<Compressor>> {
    let library = proto.compressor_library.as_ref();
    let library = library.ok_or_else(|| Reject::new("must be set").at_field("compressor_library"))?;
    let any = library.typed_config.as_ref();
    let any = any.ok_or_else(|| Reject::new("has no typed_config").at_field("compressor_library"))?;
    let level = match type_name(any) {
        "envoy.extensions.compression.gzip.compressor.v3.Gzip" => {
            let gzip: Gzip = unpack(any).at("compressor_library")?;
            match gzip.compression_level() {
                CompressionLevel::DefaultCompression => LEVEL,
                level => u32::try_from(level as i32).unwrap_or(LEVEL).clamp(1, 9),
            }
        }
        "envoy.extensions.compression.brotli.compressor.v3.Brotli"
        | "envoy.extensions.compression.zstd.compressor.v3.Zstd" => return Ok(None),
        _ => return Err(unknown_type("compressor", &library.name, any).at_field("compressor_library")),
    };
    let direction = proto.response_direction_config.as_ref();
    let common = direction.and_then(|direction| direction.common_config.as_ref());
    let mut content_types: Vec<Box<str>> = common
        .map(|common| common.content_type.iter().map(|it| it.to_ascii_lowercase().into()).collect())
        .unwrap_or_default();
    if content_types.is_empty() {
        content_types = CONTENT_TYPES.map(Into::into).into();
    }
    let min_length = common.and_then(|common| number(common.min_content_length)).unwrap_or(MIN_LENGTH);
    Ok(Some(Compressor {
        content_types,
        min_length: min_length.into(),
        leave_etag: direction.is_some_and(|direction| direction.disable_on_etag_header),
        hide_accept: direction.is_some_and(|direction| direction.remove_accept_encoding_header),
        level,
    }))
}
