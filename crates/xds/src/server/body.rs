//! gRPC's messages in the bodies of a call. On the way out, pieces that many streams share go to the connection as they are,
//! without the copy that a codec of tonic's would make. On the way in, no more memory is held than there is of a message
//! that has begun: streams are thousands, and say little.

use std::{
    future::poll_fn,
    marker::PhantomData,
    pin::Pin,
    task::{Context, Poll, ready},
    vec,
};

use bytes::{Buf as _, Bytes, BytesMut};
use http_body::{Body, Frame};
use prost::Message;
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

/// The requests of a call, each a message `R`.
pub(super) struct Requests<R> {
    body: tonic::body::Body,
    /// What has come of the next message.
    begun: BytesMut,
    kind: PhantomData<fn() -> R>,
}

/// Whether a message is compressed, and how long it is.
const PREFIX: usize = 5;

impl<R: Message + Default> Requests<R> {
    pub(super) fn new(body: tonic::body::Body) -> Self {
        Self { body, begun: BytesMut::new(), kind: PhantomData }
    }

    /// The next request; `None` when the client has no more. May be dropped and called again.
    pub(super) async fn next(&mut self) -> Result<Option<R>, Status> {
        loop {
            if let Some(request) = self.complete()? {
                return Ok(Some(request));
            }
            let Some(frame) = poll_fn(|context| Pin::new(&mut self.body).poll_frame(context)).await else {
                return Ok(None);
            };
            if let Ok(data) = frame?.into_data() {
                self.begun.extend_from_slice(&data);
            }
        }
    }

    /// Takes out the next message, if all of it is there.
    fn complete(&mut self) -> Result<Option<R>, Status> {
        let Some((prefix, content)) = self.begun.split_first_chunk::<PREFIX>() else { return Ok(None) };
        let [compressed, length @ ..] = *prefix;
        let length = u32::from_be_bytes(length) as usize;
        if compressed != 0 {
            return Err(Status::unimplemented(
                "the request is compressed, which no answer said was possible",
            ));
        }
        if length > super::MAX_REQUEST {
            let most = super::MAX_REQUEST;
            return Err(Status::resource_exhausted(format!(
                "a request of {length} bytes; at most {most} are taken"
            )));
        }
        let Some(content) = content.get(..length) else { return Ok(None) };
        let request = R::decode(content).map_err(|error| Status::invalid_argument(error.to_string()))?;
        self.begun.advance(PREFIX + length);
        if self.begun.is_empty() {
            self.begun = BytesMut::new();
        }
        Ok(Some(request))
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;

    use super::*;

    fn framed(nonce: &str) -> Vec<u8> {
        let request =
            DeltaDiscoveryRequest { response_nonce: nonce.into(), ..DeltaDiscoveryRequest::default() };
        let content = request.encode_to_vec();
        let mut message = vec![0];
        message.extend(u32::try_from(content.len()).unwrap().to_be_bytes());
        message.extend(content);
        message
    }

    /// Requests that come in pieces of this length.
    async fn read(bytes: &[u8], piece: usize) -> Vec<Result<String, tonic::Code>> {
        let (sender, queue) = mpsc::channel(bytes.len() + 1);
        for piece in bytes.chunks(piece) {
            sender.try_send(Ok(vec![Bytes::copy_from_slice(piece)])).unwrap();
        }
        drop(sender);
        let mut requests =
            Requests::<DeltaDiscoveryRequest>::new(tonic::body::Body::new(Responses::new(queue)));
        let mut read = Vec::new();
        loop {
            match requests.next().await {
                Ok(None) => return read,
                Ok(Some(request)) => read.push(Ok(request.response_nonce)),
                Err(status) => {
                    read.push(Err(status.code()));
                    return read;
                }
            }
        }
    }

    #[tokio::test]
    async fn requests_are_read_in_pieces_of_any_length() {
        let bytes = [framed("1"), framed(""), framed("three")].concat();
        for piece in 1..=bytes.len() {
            let expected = ["1", "", "three"].map(|nonce| Ok(nonce.to_owned()));
            assert_eq!(read(&bytes, piece).await, expected, "in pieces of {piece}");
        }
        assert_eq!(read(&bytes[..bytes.len() - 1], 7).await.len(), 2, "the last is not complete");
    }

    #[tokio::test]
    async fn what_is_no_request_is_refused() {
        assert_eq!(read(&[1, 0, 0, 0, 0], 5).await, [Err(tonic::Code::Unimplemented)]);
        assert_eq!(read(&[0, 0xff, 0, 0, 0], 5).await, [Err(tonic::Code::ResourceExhausted)]);
        assert_eq!(read(&[0, 0, 0, 0, 1, 0xff], 6).await, [Err(tonic::Code::InvalidArgument)]);
    }
}
