//! Translates decompression. Source: `envoy.extensions.filters.http.decompressor.v3.Decompressor`.

use skysail_xds::envoy::pb::envoy::extensions::{
    compression::{
        brotli::decompressor::v3::Brotli, gzip::decompressor::v3::Gzip, zstd::decompressor::v3::Zstd,
    },
    filters::http::decompressor::v3::{Decompressor as Proto, decompressor::CommonDirectionConfig},
};

use super::{At as _, Reject, Result, flag, number, type_name, unknown_type, unpack};
use skysail_http::decompress::{Decompressor, DecompressorCoding, Direction};

/// Envoy's default for gzip, and its constant for the other codings.
const MAX_RATIO: u32 = 100;

/// Translates the filter.
pub(super) fn translate(proto: &Proto) -> Result<Decompressor> {
    let library = proto.decompressor_library.as_ref();
    let library = library.ok_or_else(|| Reject::new("must be set").at_field("decompressor_library"))?;
    let any = library.typed_config.as_ref();
    let any = any.ok_or_else(|| Reject::new("has no typed_config").at_field("decompressor_library"))?;
    let (coding, max_ratio) = match type_name(any) {
        "envoy.extensions.compression.gzip.decompressor.v3.Gzip" => {
            let gzip: Gzip = unpack(any).at("decompressor_library")?;
            (DecompressorCoding::Gzip, number(gzip.max_inflate_ratio).unwrap_or(MAX_RATIO))
        }
        "envoy.extensions.compression.brotli.decompressor.v3.Brotli" => {
            let Brotli { .. } = unpack(any).at("decompressor_library")?;
            (DecompressorCoding::Brotli, MAX_RATIO)
        }
        "envoy.extensions.compression.zstd.decompressor.v3.Zstd" => {
            let Zstd { .. } = unpack(any).at("decompressor_library")?;
            (DecompressorCoding::Zstd, MAX_RATIO)
        }
        _ => return Err(unknown_type("decompressor", &library.name, any).at_field("decompressor_library")),
    };
    let request = proto.request_direction_config.as_ref();
    let response = proto.response_direction_config.as_ref();
    let response = direction(response.and_then(|config| config.common_config.as_ref()));
    let advertises = request.and_then(|config| flag(config.advertise_accept_encoding)).unwrap_or(true);
    Ok(Decompressor {
        coding,
        max_ratio,
        request: direction(request.and_then(|config| config.common_config.as_ref())),
        response,
        advertise: response.is_some() && advertises,
    })
}

/// Translates the settings of a direction, which is enabled by default.
fn direction(proto: Option<&CommonDirectionConfig>) -> Option<Direction> {
    let enabled = proto.and_then(|proto| proto.enabled.as_ref()).and_then(|it| flag(it.default_value));
    enabled.unwrap_or(true).then(|| Direction {
        ignore_no_transform: proto.is_some_and(|proto| proto.ignore_no_transform_header),
    })
}
