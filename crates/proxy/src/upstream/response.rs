//! Reads the heads of responses.

use std::{
    future::poll_fn,
    task::{Context, Poll, ready},
};

use skysail_http::{
    head::ResponseHead,
    http1::{ConnectionOptions, Framing, HeadLimits, Malformed, Scan, parse},
    http2::{Answered, Duplex},
    socket::Stream,
    wire::Wire,
};
use skysail_policy::error::{Error, Kind};

/// Reads the response head of a request of the sidecar itself.
pub(crate) async fn answer(
    upstream: &mut Wire,
    method: &str,
    limits: &HeadLimits,
) -> Result<(ResponseHead, Framing, ConnectionOptions), Error> {
    let (mut scan, mut head) = (Scan::default(), ResponseHead::default());
    loop {
        let answer = poll_fn(|cx| match upstream {
            Wire::Http1(stream) => poll_head(cx, stream, (&mut scan, limits), method, &mut head),
            Wire::Http2(duplex) => poll_answer(cx, duplex, method, &mut head),
        });
        if let Some((framing, connection)) = answer.await? {
            return Ok((head, framing, connection));
        }
    }
}

/// Response head; `None` for an interim response (1xx).
type HeadResult = Result<Option<(Framing, ConnectionOptions)>, Error>;

/// Reads the head of an HTTP/1.1 response.
pub(crate) fn poll_head(
    cx: &mut Context<'_>,
    stream: &mut Stream,
    (scan, limits): (&mut Scan, &HeadLimits),
    method: &str,
    head: &mut ResponseHead,
) -> Poll<HeadResult> {
    let malformed = |why: Malformed| {
        Error::new(if why.status == 431 { Kind::AnswerTooLarge } else { Kind::UpstreamProtocol })
    };
    loop {
        if let Some(end) = scan.end(stream.input.bytes(), limits).map_err(malformed)? {
            let parsed = parse::response(&stream.input.bytes()[..end], limits, method, head);
            stream.input.consume(end);
            let parsed = parsed.map_err(malformed)?;
            let interim = matches!(head.status(), 100 | 102..=199);
            return Poll::Ready(Ok(if interim { None } else { Some(parsed) }));
        }
        if stream.input.is_full() {
            stream.input.grow(limits.max_head);
        }
        match ready!(stream.poll_fill(cx)) {
            Ok(1..) => {}
            Ok(0) => return Poll::Ready(Err(Error::new(Kind::UpstreamClosed))),
            Err(error) => return Poll::Ready(Err(Error::caused(Kind::UpstreamClosed, error))),
        }
    }
}

/// Reads the head of an HTTP/2 response.
pub(crate) fn poll_answer(
    cx: &mut Context<'_>,
    duplex: &mut Duplex,
    method: &str,
    head: &mut ResponseHead,
) -> Poll<HeadResult> {
    let answered = ready!(duplex.poll_answer(cx, method, head))?;
    Poll::Ready(Ok(match answered {
        Answered::Interim => None,
        Answered::Final(framing) => Some((framing, ConnectionOptions::default())),
    }))
}
