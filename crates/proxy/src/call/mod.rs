//! Requests of our own to clusters: for keys, for what others decide, to tell what happened. They take the pools, the
//! endpoints and the limits of requests like any other, and their answers are read whole.

pub(crate) mod export;

use std::{
    future::poll_fn,
    rc::Rc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use crate::{
    upstream::{
        self, Offer, pick,
        pool::{Busy, Host, Link, Pool, Upstream},
        response,
    },
    worker::Worker,
};
use skysail_http::{
    flow::Flow,
    head::{Headers, RequestHead, ResponseHead, Version},
    http1::{Framing, write::Persistence},
    http2::{Answered, Duplex},
    timer,
    wire::Wire,
};
use skysail_policy::{
    balance::Want,
    config::Snapshot,
    error::{Error, Kind},
    outlier::UpstreamResult,
};

/// As large as an answer may be.
const MOST: usize = 1 << 20;

/// An answer, read whole.
pub(crate) struct CallResponse {
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
) -> Result<CallResponse, Error> {
    let pool = worker.pool(cluster, snapshot).ok_or_else(|| Error::new(Kind::ClusterNotFound(503)))?;
    let (host, _busy) = place(worker, &pool)?;
    let exchange = exchange(worker, &pool, &host, head, content);
    let asked = timer::timeout(limit, exchange).await;
    let asked = asked.unwrap_or_else(|| Err(Error::new(Kind::ResponseTimeout)));
    match &asked {
        Ok(answer) => pool.note(&host.endpoint, UpstreamResult::Answered(answer.head.status()), &worker.dice),
        Err(error) => pool.note_failure(&host.endpoint, &error.kind, &worker.dice),
    }
    asked
}

/// An endpoint, and a place among the requests that its cluster allows: what is asked by ourselves counts like any other.
pub(crate) fn place(worker: &Worker, pool: &Rc<Pool>) -> Result<(Rc<Host>, Busy), Error> {
    // There is no original destination to follow.
    let nowhere = std::net::SocketAddr::from(([0, 0, 0, 0], 0));
    let host = pick::endpoint(&worker.dice, pool, nowhere, Want::default())?;
    let busy = pool.begin(&host).ok_or_else(|| Error::new(Kind::Overflow))?;
    Ok((host, busy))
}

async fn exchange(
    worker: &Worker,
    pool: &Rc<Pool>,
    host: &Rc<Host>,
    head: &RequestHead,
    content: &[u8],
) -> Result<CallResponse, Error> {
    let mut upstream = connection(worker, pool, host, head).await?;
    let framing = Framing::Length(content.len() as u64);
    upstream.wire.request(head, framing, Persistence::Keep)?;
    let mut body = Flow::whole(content, framing, None);
    poll_fn(|cx| body.poll_send(cx, &mut upstream.wire))
        .await
        .map_err(|_| Error::new(Kind::UpstreamClosed))?;
    let is_connect = head.method() == "CONNECT";
    let limits = pool.cluster.head_limits();
    let (head, answer, connection) = response::answer(&mut upstream.wire, head.method(), &limits).await?;
    let mut answer = Flow::new(answer, answer, limits, true);
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
    Ok(CallResponse { head, content, trailers })
}

async fn connection(
    worker: &Worker,
    pool: &Rc<Pool>,
    host: &Rc<Host>,
    head: &RequestHead,
) -> Result<Upstream, Error> {
    let offer = Offer::http(&pool.cluster, head, false);
    // One that the server has closed meanwhile is of no use.
    let pooled = upstream::take(pool, host, &offer)?.and_then(|mut one| one.is_quiet_now().then_some(one));
    match pooled {
        Some(pooled) => Ok(pooled),
        None => upstream::get(pool, host, &offer, &worker.shared.dialer, true).await,
    }
}

/// A call of gRPC that goes on: a message is sent now and then, and what is answered says only that it is over.
pub(crate) struct CallStream {
    duplex: Box<Duplex>,
    link: Rc<Link>,
    _busy: Busy,
    new: bool,
    answered: bool,
}

impl CallStream {
    /// Begins one.
    ///
    /// # Errors
    ///
    /// Whatever can be wrong with an upstream, and that it does not speak HTTP/2.
    pub(crate) async fn open(
        worker: &Rc<Worker>,
        snapshot: &Snapshot,
        cluster: &str,
        head: &RequestHead,
    ) -> Result<Self, Error> {
        let pool = worker.pool(cluster, snapshot).ok_or_else(|| Error::new(Kind::ClusterNotFound(503)))?;
        let (host, busy) = place(worker, &pool)?;
        let opened = connection(worker, &pool, &host, head).await;
        if let Err(error) = &opened {
            pool.note_failure(&host.endpoint, &error.kind, &worker.dice);
        }
        let Upstream { wire, link } = opened?;
        let Wire::Http2(mut duplex) = wire else {
            return Err(Error::caused(Kind::UpstreamProtocol, "the cluster does not speak HTTP/2"));
        };
        duplex.request(head, false, false)?;
        Ok(Self { duplex, link, _busy: busy, new: true, answered: false })
    }

    /// Whether nothing has been sent on it.
    pub(crate) fn is_new(&self) -> bool {
        self.new
    }

    /// Whether the server has neither ended it nor lost it, as far as is known.
    pub(crate) fn is_open(&mut self) -> bool {
        let mut cx = Context::from_waker(Waker::noop());
        let mut head = ResponseHead::default();
        while !self.answered {
            match self.duplex.poll_answer(&mut cx, "POST", &mut head) {
                Poll::Pending => return !self.duplex.is_gone(&mut cx),
                Poll::Ready(Ok(Answered::Interim)) => {}
                Poll::Ready(Ok(Answered::Final(_))) => self.answered = true,
                Poll::Ready(Err(_)) => return false,
            }
        }
        while let Poll::Ready(piece) = self.duplex.poll_piece(&mut cx) {
            match piece {
                Ok(Some(piece)) => self.duplex.release(piece.len()),
                _ => return false,
            }
        }
        !self.duplex.is_gone(&mut cx)
    }

    /// Whether a new one would not lead elsewhere, or the worker ends anyway.
    pub(crate) fn is_wanted(&self, worker: &Worker) -> bool {
        worker.is_ending() || self.link.is_good()
    }

    /// Sends a message with its frame.
    ///
    /// # Errors
    ///
    /// The server takes no more.
    pub(crate) async fn send(&mut self, mut frame: &[u8]) -> Result<(), Error> {
        self.new = false;
        let gone = |_| Error::new(Kind::UpstreamReset);
        while !frame.is_empty() {
            let room = poll_fn(|cx| self.duplex.poll_room(cx, frame.len())).await.map_err(gone)?;
            self.duplex.send(&frame[..room], false).map_err(gone)?;
            frame = &frame[room..];
        }
        Ok(())
    }

    /// Ends it, and waits for the server to do so, too.
    pub(crate) async fn finish(mut self) {
        if self.duplex.send(b"", true).is_ok() {
            if !self.answered {
                poll_fn(|cx| self.duplex.poll_ignored(cx)).await;
            }
            while let Ok(Some(piece)) = poll_fn(|cx| self.duplex.poll_piece(cx)).await {
                self.duplex.release(piece.len());
            }
        }
    }
}

/// The head of a call of gRPC.
pub(crate) fn grpc_head(path: &str, authority: &str) -> RequestHead {
    let fields = [("content-type", "application/grpc"), ("te", "trailers")];
    let mut head = RequestHead::build("POST", path, authority, &fields);
    head.version = Version::Http2;
    head
}

/// A message as gRPC frames it: not compressed, after its length.
pub(crate) fn grpc_frame(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    let mut frame = vec![0];
    frame.extend_from_slice(&length.to_be_bytes());
    frame.extend_from_slice(message);
    frame
}

/// The message of an answer.
///
/// # Errors
///
/// The call failed, with what gRPC says of it, or the answer is none of gRPC's.
pub(crate) fn grpc_message(answer: &CallResponse) -> Result<&[u8], Error> {
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
