//! Messages to a processor.

use skysail_xds::envoy::pb::envoy::{
    extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode,
    service::ext_proc::v3::{
        HttpBody, HttpTrailers, ProtocolConfiguration, processing_request::Request as Message,
        processing_response::Response as Answer,
    },
};

use super::Side;
use skysail_policy::config::processing::{BodyMode, ProcessingMode};

/// Returns the description of the bodies, for the first message.
pub(super) fn protocol(mode: ProcessingMode) -> ProtocolConfiguration {
    let proto = |mode| match mode {
        BodyMode::None => BodySendMode::None,
        BodyMode::Buffered => BodySendMode::Buffered,
        BodyMode::BufferedPartial => BodySendMode::BufferedPartial,
        BodyMode::Streamed => BodySendMode::Streamed,
        BodyMode::FullDuplex => BodySendMode::FullDuplexStreamed,
    };
    ProtocolConfiguration {
        request_body_mode: proto(mode.request_body).into(),
        response_body_mode: proto(mode.response_body).into(),
        ..ProtocolConfiguration::default()
    }
}

pub(super) fn body_message(side: Side, body: HttpBody) -> Message {
    match side {
        Side::Request => Message::RequestBody(body),
        Side::Response => Message::ResponseBody(body),
    }
}

pub(super) fn trailers_message(side: Side, trailers: HttpTrailers) -> Message {
    match side {
        Side::Request => Message::RequestTrailers(trailers),
        Side::Response => Message::ResponseTrailers(trailers),
    }
}

/// Returns a function that says whether an answer is one to this message.
pub(super) fn answers(message: &Message) -> fn(&Answer) -> bool {
    match message {
        Message::RequestHeaders(_) => |answer| matches!(answer, Answer::RequestHeaders(_)),
        Message::ResponseHeaders(_) => |answer| matches!(answer, Answer::ResponseHeaders(_)),
        Message::RequestBody(_) => |answer| matches!(answer, Answer::RequestBody(_)),
        Message::ResponseBody(_) => |answer| matches!(answer, Answer::ResponseBody(_)),
        Message::RequestTrailers(_) => |answer| matches!(answer, Answer::RequestTrailers(_)),
        Message::ResponseTrailers(_) => |answer| matches!(answer, Answer::ResponseTrailers(_)),
    }
}
