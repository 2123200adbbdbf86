//! gRPC: the response to a call returns the messages of the request as they arrive. The health service reports SERVING.
//!
//! Source: gRPC's "gRPC over HTTP2" and "Health Checking".

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use axum::{
    body::{Body, Bytes, HttpBody},
    http::{HeaderMap, HeaderName, HeaderValue, Version, header::CONTENT_TYPE, request::Parts},
    response::Response,
};
use hyper::body::Frame;

const OK: u8 = 0;
const UNIMPLEMENTED: u8 = 12;
const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const HEALTH_CHECK: &str = "/grpc.health.v1.Health/Check";
/// The message `HealthCheckResponse { status: SERVING }` with its prefix: compression flag and length.
const SERVING: &[u8] = &[0, 0, 0, 0, 2, 0x08, 1];
/// Prefix of gRPC's own services, whose messages are not echoed.
const OWN: &str = "/grpc.";

/// Returns whether a request is a gRPC call. Calls need trailers, and therefore HTTP/2.
pub(super) fn is_call(head: &Parts) -> bool {
    let content = head.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    let rest = content.strip_prefix(b"application/grpc");
    head.version == Version::HTTP_2 && rest.is_some_and(|rest| matches!(rest, [] | [b'+' | b';', ..]))
}

/// Answers a call. Returns the gRPC status and the response.
pub(super) fn answer(head: &Parts, body: Body) -> (u8, Response) {
    let content = head.headers.get(CONTENT_TYPE).cloned();
    let content = content.unwrap_or(HeaderValue::from_static("application/grpc"));
    let path = head.uri.path();
    let (code, body) = match path {
        HEALTH_CHECK => (OK, Body::new(EchoBody::new(Body::from(SERVING)))),
        path if path.starts_with(OWN) => (UNIMPLEMENTED, Body::empty()),
        _ => (OK, Body::new(EchoBody::new(body))),
    };
    let mut answer = Response::new(body);
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, content);
    if code != OK {
        // A response without a message has its trailers in its head ("Trailers-Only").
        headers.insert(STATUS, HeaderValue::from(u16::from(code)));
        headers.insert(MESSAGE, HeaderValue::from_static("a stand-in has only grpc.health.v1.Health/Check"));
    } else if path != HEALTH_CHECK {
        // Compressed messages are returned unchanged.
        headers.extend(head.headers.get(&ENCODING).map(|encoding| (ENCODING, encoding.clone())));
    }
    (code, answer)
}

/// Body with messages, followed by the trailers of a successful call.
struct EchoBody {
    messages: Body,
    has_ended: bool,
}

impl EchoBody {
    fn new(messages: Body) -> Self {
        Self { messages, has_ended: false }
    }
}

impl HttpBody for EchoBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        loop {
            match ready!(Pin::new(&mut self.messages).poll_frame(context)) {
                // Trailers of the client are not returned: those of the response have the status of the call.
                Some(Ok(frame)) if frame.is_trailers() => {}
                Some(frame) => return Poll::Ready(Some(frame)),
                None => break,
            }
        }
        self.has_ended = true;
        let trailers = HeaderMap::from_iter([(STATUS, HeaderValue::from(u16::from(OK)))]);
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::Request;

    fn call(version: Version, content: &str) -> bool {
        let request = Request::post("/a.B/C").version(version).header(CONTENT_TYPE, content);
        is_call(&request.body(()).unwrap().into_parts().0)
    }

    #[test]
    fn calls_are_identified_by_their_content_type() {
        for content in ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8"] {
            assert!(call(Version::HTTP_2, content), "{content}");
            assert!(!call(Version::HTTP_11, content), "{content}");
        }
        for content in ["application/grpc-web", "application/grpcx", "application/json"] {
            assert!(!call(Version::HTTP_2, content), "{content}");
        }
    }
}
