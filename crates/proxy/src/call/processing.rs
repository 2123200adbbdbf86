//! Processing modes of external processors, in the configuration and in answers of processors.

use skysail_xds::envoy::pb::envoy::extensions::filters::http::ext_proc::v3::{
    ProcessingMode as ModeProto,
    processing_mode::{BodySendMode, HeaderSendMode},
};

use skysail_policy::config::processing::{BodyMode, ProcessingMode};

/// A mode that is not supported.
#[derive(Debug)]
pub(crate) struct UnsupportedMode {
    /// Name of the field.
    pub(crate) field: &'static str,
    pub(crate) reason: String,
}

/// Converts a processing mode.
///
/// # Errors
/// The mode is not supported.
pub(crate) fn mode(proto: &ModeProto) -> Result<ProcessingMode, UnsupportedMode> {
    let is_sent = |mode, default| match mode {
        HeaderSendMode::Default => default,
        HeaderSendMode::Send => true,
        HeaderSendMode::Skip => false,
    };
    let body = |mode: BodySendMode, field| match mode {
        BodySendMode::None => Ok(BodyMode::None),
        BodySendMode::Buffered => Ok(BodyMode::Buffered),
        BodySendMode::BufferedPartial => Ok(BodyMode::BufferedPartial),
        BodySendMode::Streamed => Ok(BodyMode::Streamed),
        BodySendMode::FullDuplexStreamed => Ok(BodyMode::FullDuplex),
        BodySendMode::Grpc => {
            let reason = "GRPC is not supported: use STREAMED or FULL_DUPLEX_STREAMED".to_owned();
            Err(UnsupportedMode { field, reason })
        }
    };
    let mode = ProcessingMode {
        request_headers: is_sent(proto.request_header_mode(), true),
        response_headers: is_sent(proto.response_header_mode(), true),
        request_body: body(proto.request_body_mode(), "request_body_mode")?,
        response_body: body(proto.response_body_mode(), "response_body_mode")?,
        request_trailers: is_sent(proto.request_trailer_mode(), false),
        response_trailers: is_sent(proto.response_trailer_mode(), false),
    };
    // As in Envoy: trailers tell the processor that it has the whole body.
    for (trailers, body, field) in [
        (mode.request_trailers, mode.request_body, "request_trailer_mode"),
        (mode.response_trailers, mode.response_body, "response_trailer_mode"),
    ] {
        if !trailers && body == BodyMode::FullDuplex {
            let reason = "must be SEND if the body mode is FULL_DUPLEX_STREAMED".to_owned();
            return Err(UnsupportedMode { field, reason });
        }
    }
    Ok(mode)
}
