//! Responses as the body of an HTTP answer: pieces that many streams share go to the connection as they are, without the copy
//! that a codec of tonic's would make.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    vec,
};

use bytes::Bytes;
use http_body::{Body, Frame};
use tokio::sync::mpsc;
use tonic::{
    Status,
    codegen::http::{self, HeaderMap, HeaderValue, header::CONTENT_TYPE},
};

/// The messages of a call, each in pieces, and its status.
pub(super) struct Responses {
    queue: mpsc::Receiver<Result<Vec<Bytes>, Status>>,
    /// What is left of the message that is being sent.
    pieces: vec::IntoIter<Bytes>,
    ended: bool,
}

impl Responses {
    pub(super) fn new(queue: mpsc::Receiver<Result<Vec<Bytes>, Status>>) -> Self {
        Self { queue, pieces: Vec::new().into_iter(), ended: false }
    }
}

/// A call's answer.
pub(super) fn response(responses: Responses) -> http::Response<tonic::body::Body> {
    let mut response = http::Response::new(tonic::body::Body::new(responses));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

impl Body for Responses {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        loop {
            if let Some(piece) = self.pieces.next() {
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
            if self.ended {
                return Poll::Ready(None);
            }
            let status = match ready!(self.queue.poll_recv(context)) {
                Some(Ok(pieces)) => {
                    self.pieces = pieces.into_iter();
                    continue;
                }
                Some(Err(status)) => status,
                None => Status::ok(""),
            };
            self.ended = true;
            let mut trailers = HeaderMap::new();
            status.add_header(&mut trailers)?;
            return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
        }
    }
}
