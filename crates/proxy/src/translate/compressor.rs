//! Translates response compression. Source: `envoy.extensions.filters.http.compressor.v3.Compressor`.

use skysail_xds::envoy::pb::envoy::extensions::{
    compression::{
        brotli::compressor::v3::Brotli,
        gzip::compressor::v3::{Gzip, gzip::CompressionLevel},
        zstd::compressor::v3::Zstd,
    },
    filters::http::compressor::v3::{
        Compressor as Proto, CompressorPerRoute, compressor_per_route::Override,
    },
};

use super::{At as _, Reject, Result, flag, number, type_name, unknown_type, unpack};
use skysail_http::compress::{CONTENT_TYPES, Coding, Compressor};
use skysail_policy::config::route::Setting;

/// Minimum content length in bytes; shorter responses are not compressed.
const MIN_LENGTH: u32 = 30;
/// Envoy's default compression level, which is zlib's.
const LEVEL: u32 = 6;
/// Envoy's defaults for Brotli and zstd.
const BROTLI_QUALITY: u32 = 3;
const BROTLI_WINDOW: u32 = 18;
const ZSTD_LEVEL: u32 = 3;

/// Translates the filter. Returns `None` if it is disabled.
#[expect(deprecated, reason = "Istio still sends content_type")]
pub(super) fn translate(proto: &Proto) -> Result<Option<Compressor>> {
    let library = proto.compressor_library.as_ref();
    let library = library.ok_or_else(|| Reject::new("must be set").at_field("compressor_library"))?;
    let any = library.typed_config.as_ref();
    let any = any.ok_or_else(|| Reject::new("has no typed_config").at_field("compressor_library"))?;
    let coding = match type_name(any) {
        "envoy.extensions.compression.gzip.compressor.v3.Gzip" => {
            let gzip: Gzip = unpack(any).at("compressor_library")?;
            Coding::Gzip(match gzip.compression_level() {
                CompressionLevel::DefaultCompression => LEVEL,
                level => u32::try_from(level as i32).unwrap_or(LEVEL).clamp(1, 9),
            })
        }
        "envoy.extensions.compression.brotli.compressor.v3.Brotli" => {
            let brotli: Brotli = unpack(any).at("compressor_library")?;
            let quality = between(number(brotli.quality).unwrap_or(BROTLI_QUALITY), 0, 11);
            let window = between(number(brotli.window_bits).unwrap_or(BROTLI_WINDOW), 10, 24);
            Coding::Brotli {
                quality: quality.at("compressor_library.quality")?,
                window_bits: window.at("compressor_library.window_bits")?,
            }
        }
        "envoy.extensions.compression.zstd.compressor.v3.Zstd" => {
            let zstd: Zstd = unpack(any).at("compressor_library")?;
            let level = between(number(zstd.compression_level).unwrap_or(ZSTD_LEVEL), 1, 22);
            Coding::Zstd(level.at("compressor_library.compression_level")?.cast_signed())
        }
        _ => return Err(unknown_type("compressor", &library.name, any).at_field("compressor_library")),
    };
    let direction = proto.response_direction_config.as_ref();
    let common = direction.and_then(|direction| direction.common_config.as_ref());
    let enabled = common.and_then(|common| common.enabled.as_ref());
    if enabled.is_some_and(|enabled| flag(enabled.default_value) == Some(false)) {
        return Ok(None);
    }
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
        choose_first: proto.choose_first,
        coding,
    }))
}

fn between(value: u32, min: u32, max: u32) -> Result<u32> {
    if (min..=max).contains(&value) {
        return Ok(value);
    }
    Err(Reject::new(format!("{value} is not between {min} and {max}")))
}

/// Translates a route's setting.
pub(super) fn setting(proto: &CompressorPerRoute) -> Result<Setting> {
    match &proto.r#override {
        Some(Override::Disabled(true)) => Ok(Setting::Off),
        _ => Err(Reject::new("only disabled: true is supported")),
    }
}
