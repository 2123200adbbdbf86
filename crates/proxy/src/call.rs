//! Requests of our own to clusters: for keys and for what others decide. They take the pools, the endpoints and the
//! limits of requests like any other, and their answers are read whole.

use std::{future::poll_fn, rc::Rc, time::Duration};

use crate::{
    balance::Want,
    config::Snapshot,
    context::Worker,
    error::{Error, Kind},
    exchange,
    flow::Flow,
    head::{Headers, RequestHead, ResponseHead, Version},
    http1::{Framing, write::Persistence},
    outlier::Outcome,
    pick,
    pool::{Busy, Host, Pool, Upstream},
    timer,
    upstream::{self, Offer},
};

/// As large as an answer may be.
const MOST: usize = 1 << 20;

/// An answer, read whole.
pub(crate) struct Answer {
    pub(crate) head: ResponseHead,
    pub(crate) content: Vec<u8>,
    pub(crate) trailers: Option<Headers>,
}

/// Asks a cluster; the answer must be here within `limit` and hold at most 1 MiB.
///
/// # Errors
///
/// Whatever can be wrong with an upstream, and [`Kind::BodyTooLarge`].
pub(crate) async fn ask(
    worker: &Rc<Worker>,
    snapshot: &Snapshot,
    cluster: &str,
    head: &RequestHead,
    content: &[u8],
    limit: Duration,
) -> Result<Answer, Error> {
    let pool = worker.pool(cluster, snapshot).ok_or_else(|| Error::new(Kind::ClusterNotFound(503)))?;
    let (host, _busy) = place(worker, &pool)?;
    let exchange = exchange(worker, &pool, &host, head, content);
    let asked = timer::timeout(limit, exchange).await;
    let asked = asked.unwrap_or_else(|| Err(Error::new(Kind::ResponseTimeout)));
    match &asked {
        Ok(answer) => pool.note(&host.endpoint, Outcome::Answered(answer.head.status()), &worker.dice),
        Err(error) => pool.note_failure(&host.endpoint, &error.kind, &worker.dice),
    }
    asked
}

/// An endpoint, and a place among the requests that its cluster allows: what is asked by ourselves counts like any other.
pub(crate) fn place(worker: &Worker, pool: &Rc<Pool>) -> Result<(Rc<Host>, Busy), Error> {
    // There is no original destination to follow.
    let nowhere = std::net::SocketAddr::from(([0, 0, 0, 0], 0));
    let host = pick::endpoint(worker, pool, nowhere, Want::default())?;
    let busy = pool.begin(&host).ok_or_else(|| Error::new(Kind::Overflow))?;
    Ok((host, busy))
}

async fn exchange(
    worker: &Worker,
    pool: &Rc<Pool>,
    host: &Rc<Host>,
    head: &RequestHead,
    content: &[u8],
) -> Result<Answer, Error> {
    let offer = Offer::http(&pool.cluster, head.version, false);
    // One that the server has closed meanwhile is of no use.
    let pooled = upstream::take(pool, host, offer)?.and_then(|mut one| one.is_quiet_now().then_some(one));
    let mut upstream = match pooled {
        Some(pooled) => pooled,
        None => upstream::get(pool, host, offer, &worker.shared, true).await?,
    };
    let framing = Framing::Length(content.len() as u64);
    upstream.wire.request(head, framing, Persistence::Keep)?;
    let mut body = Flow::whole(content, framing, None);
    poll_fn(|cx| body.poll_send(cx, &mut upstream.wire))
        .await
        .map_err(|_| Error::new(Kind::UpstreamClosed))?;
    let is_connect = head.method() == "CONNECT";
    let (head, answer, connection) = exchange::answer(&mut upstream.wire, head.method()).await?;
    let mut answer = Flow::new(answer, answer, exchange::RESPONSE_LIMITS, true);
    poll_fn(|cx| answer.poll_collect(cx, &mut upstream.wire, MOST))
        .await
        .map_err(|_| Error::new(Kind::UpstreamClosed))?;
    let whole = answer.kept().filter(|_| answer.is_collected());
    let content = whole.ok_or_else(|| Error::new(Kind::BodyTooLarge))?.to_vec();
    let trailers = answer.trailers().cloned();
    // What follows the answer to CONNECT is nobody's answer.
    if !connection.close && !is_connect {
        Upstream::give_back(upstream);
    }
    Ok(Answer { head, content, trailers })
}

/// The head of a unary call of gRPC.
pub(crate) fn grpc_head(path: &str, authority: &str) -> RequestHead {
    let fields = [("content-type", "application/grpc"), ("te", "trailers")];
    let mut head = RequestHead::build("POST", path, authority, &fields);
    head.version = Version::Http2;
    head
}

/// A message as gRPC frames it: not compressed, after its length.
pub(crate) fn grpc_frame(message: &impl prost::Message) -> Vec<u8> {
    let length = u32::try_from(message.encoded_len()).unwrap_or(u32::MAX);
    let mut frame = vec![0];
    frame.extend_from_slice(&length.to_be_bytes());
    frame.extend_from_slice(&message.encode_to_vec());
    frame
}

/// The message of an answer.
///
/// # Errors
///
/// The call failed, with what gRPC says of it, or the answer is none of gRPC's.
pub(crate) fn grpc_message(answer: &Answer) -> Result<&[u8], Error> {
    let failed = |what: String| Err(Error::caused(Kind::UpstreamProtocol, what));
    let fields = answer.trailers.as_ref().unwrap_or_else(|| answer.head.headers());
    let text = |name| fields.header(name).map(String::from_utf8_lossy).unwrap_or_default();
    match (answer.head.status(), &*text("grpc-status")) {
        (200, "0") => {}
        (200, status) => return failed(format!("gRPC status {status}: {}", text("grpc-message"))),
        (status, _) => return failed(format!("HTTP status {status}")),
    }
    match answer.content.split_first_chunk::<5>() {
        Some(([0, length @ ..], message)) if u32::from_be_bytes(*length) as usize == message.len() => {
            Ok(message)
        }
        _ => failed("no message of gRPC".to_owned()),
    }
}
