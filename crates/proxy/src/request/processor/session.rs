//! The call of a processor: a state machine that the request's task polls, or the task of an observing processor.
//!
//! The request's task polls it while it waits for an answer, and while it forwards a body through a stage. Messages of
//! both sides share the call. Answers of a side arrive in the order of its messages. The call holds a bounded number of
//! bytes: a stage closes above [`MAX_HELD`], and nothing is read from the processor above [`MAX_READY`].

mod answers;

use std::{
    cell::RefCell,
    collections::VecDeque,
    future::Future,
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll},
    time::Instant,
};

use skysail_proto::Codec as _;
use skysail_xds::envoy::pb::{
    envoy::{
        config::core::v3::{HeaderMap, Metadata},
        service::ext_proc::v3::{
            HttpBody, HttpTrailers, ImmediateResponse, ProcessingRequest, ProcessingResponse,
            ProtocolConfiguration, processing_request::Request as Message,
        },
    },
    google::protobuf::Struct,
};

use super::{
    ProcessorFailure, Side,
    changes::fields,
    messages::{answers, body_message, protocol, trailers_message},
    observer::Observer,
    queue::{Awaited, SideQueue, StageMode},
};
use crate::{
    call::{self, CallFailure, CallStream},
    overload::limit_log::{self, Limit},
    telemetry::stats::ManagerStats,
    worker::Worker,
};
use skysail_http::{
    stage::BodyPart,
    timer::{Timer, earlier},
};
use skysail_policy::{
    config::{
        HttpManager,
        processing::{ExternalProcessing, ProcessingMode, ProcessingOverride},
    },
    error::Error,
};

/// Path of the gRPC method.
const PROCESS: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";

/// Name of the filter in attributes.
const EXT_PROC: &str = "envoy.filters.http.ext_proc";

/// Maximum size of an answer in bytes: a body of maximum size, and as many bytes of headers.
const MAX_ANSWER: usize = 2 << 20;

/// Number of bytes from which on a stage takes no more: held content of its side, and messages that are not sent yet.
const MAX_HELD: usize = 256 << 10;

/// Number of content bytes for a receiver above which no answers are read.
const MAX_READY: usize = 1 << 20;

/// Number of answers read in one poll before the task yields to others.
const ANSWERS_PER_POLL: usize = 64;

pub(crate) type SharedSession = Rc<RefCell<ProcessorSession>>;

/// The answer does not arrive, because the call has ended. [`ProcessorSession::take_end`] says how.
#[derive(Debug)]
pub(crate) struct Stopped;

/// The end of a call.
#[derive(Debug)]
pub(crate) enum CallEnd {
    /// The exchange continues without the processor.
    Continue,
    /// The processor has answered the request.
    Answered(Box<ImmediateResponse>),
    /// The exchange fails with this status and these details.
    Failed(u16, String),
}

type Opening = Pin<Box<dyn Future<Output = Result<CallStream, Error>>>>;

pub(super) enum CallState {
    /// No message has been sent.
    Idle,
    Opening(Opening),
    Open(Box<CallStream>),
    Closed,
}

/// A call, with its messages and answers.
pub(crate) struct ProcessorSession {
    worker: Rc<Worker>,
    pub(super) stats: Rc<ManagerStats>,
    stat_prefix: Arc<str>,
    config: Arc<ExternalProcessing>,
    by_route: Option<Arc<ProcessingOverride>>,
    pub(super) call: CallState,
    /// Description of the bodies, for the first message.
    protocol: Option<ProtocolConfiguration>,
    /// Framed messages that wait for space.
    frames: VecDeque<Vec<u8>>,
    /// Number of bytes of the first frame that have been sent.
    sent: usize,
    /// Number of bytes of all frames.
    queued: usize,
    sides: [SideQueue; 2],
    timer: Timer,
    /// Answers are not read, because a receiver is slow.
    is_paused: bool,
    end: Option<CallEnd>,
    /// Metadata in answers about bodies, by side, until the request's task takes them.
    metadata: [Struct; 2],
    /// Size in bytes of all metadata in answers about bodies.
    metadata_size: usize,
    /// State of a processor that only observes.
    pub(super) observer: Option<Observer>,
}

impl ProcessorSession {
    pub(super) fn new(
        worker: &Rc<Worker>,
        manager: &HttpManager,
        config: &Arc<ExternalProcessing>,
        by_route: Option<&Arc<ProcessingOverride>>,
        mode: ProcessingMode,
    ) -> Self {
        Self {
            worker: worker.clone(),
            stats: worker.shard.manager(&manager.stat_prefix),
            stat_prefix: manager.stat_prefix.clone(),
            config: config.clone(),
            by_route: by_route.cloned(),
            call: CallState::Idle,
            protocol: Some(protocol(mode)),
            frames: VecDeque::new(),
            sent: 0,
            queued: 0,
            sides: Default::default(),
            timer: Timer::default(),
            is_paused: false,
            end: None,
            metadata: Default::default(),
            metadata_size: 0,
            observer: config.observes.map(|_| Observer::default()),
        }
    }

    /// Returns whether the processor gets nothing more.
    pub(crate) fn is_ended(&self) -> bool {
        self.end.is_some()
    }

    /// Returns how the call has ended; `None` if it has not. Later calls return [`CallEnd::Continue`].
    pub(crate) fn take_end(&mut self) -> Option<CallEnd> {
        self.end.as_mut().map(|end| std::mem::replace(end, CallEnd::Continue))
    }

    pub(super) fn stats(&self) -> Rc<ManagerStats> {
        self.stats.clone()
    }

    /// Takes the metadata in answers about the bodies of requests and of responses.
    pub(crate) fn take_metadata(&mut self) -> [Struct; 2] {
        self.metadata_size = 0;
        std::mem::take(&mut self.metadata)
    }

    /// Sets the metadata of the next messages of a side, and the attributes of the next one.
    pub(crate) fn set_data(&mut self, side: Side, metadata: Metadata, attributes: Option<Struct>) {
        let side = &mut self.sides[side as usize];
        side.metadata = metadata;
        side.attributes = attributes.or(side.attributes.take());
    }

    /// Sends a message, whose answer [`Self::poll_answer`] returns. The answer has a deadline if `is_timed`.
    pub(crate) fn ask(&mut self, side: Side, message: Message, is_timed: bool) {
        let is_answer = answers(&message);
        self.send(side, message);
        self.push_awaited(side, Awaited::Answer(is_answer), is_timed);
    }

    /// Sends a message that has no answer, because the processor only observes.
    pub(super) fn tell(&mut self, side: Side, message: Message) {
        if self.end.is_none() {
            self.send(side, message);
        }
    }

    /// Returns whether all messages have been sent.
    pub(super) fn has_sent_all(&self) -> bool {
        self.frames.is_empty()
    }

    /// Sends and receives what is possible, for the task of a processor that only observes.
    pub(super) fn poll_task(&mut self, cx: &mut Context<'_>) {
        if self.end.is_none()
            && let Err(failure) = self.poll_call(cx, Side::Request)
        {
            self.fail(failure);
        }
    }

    /// Waits for the answer to [`Self::ask`].
    pub(crate) fn poll_answer(
        &mut self,
        cx: &mut Context<'_>,
        side: Side,
    ) -> Poll<Result<ProcessingResponse, Stopped>> {
        self.poll(cx, side);
        if self.end.is_some() {
            return Poll::Ready(Err(Stopped));
        }
        match self.sides[side as usize].answer.take() {
            Some(answer) => Poll::Ready(Ok(answer)),
            None => Poll::Pending,
        }
    }

    /// Begins to pass the body of a side through the processor.
    pub(crate) fn begin_stage(&mut self, side: Side, mode: StageMode, sends_trailers: bool) {
        let side = &mut self.sides[side as usize];
        (side.mode, side.sends_trailers) = (Some(mode), sends_trailers);
    }

    /// Returns whether the body of a side is passed through the processor.
    pub(crate) fn has_stage(&self, side: Side) -> bool {
        self.sides[side as usize].mode.is_some()
    }

    /// Returns whether a stage takes content.
    pub(super) fn is_open(&self, side: Side) -> bool {
        let queue = &self.sides[side as usize];
        let may_send = match (&self.end, queue.mode) {
            (Some(_), _) => true,
            // Until the call is open, no content is sent, so the body can be forwarded unchanged after a failure.
            (None, Some(StageMode::Duplex)) => matches!(self.call, CallState::Open(_)),
            (None, _) => true,
        };
        may_send && queue.held() + self.queued < MAX_HELD
    }

    /// Takes the next part of a side's body.
    pub(super) fn push(&mut self, side: Side, piece: BodyPart) {
        let BodyPart { data, end, trailers } = piece;
        let queue = &mut self.sides[side as usize];
        if self.end.is_some() {
            // What waits for an answer comes before this part.
            queue.release();
        }
        queue.is_source_ended |= end;
        let mode = queue.mode.filter(|_| self.end.is_none());
        let is_sent = !matches!(mode, None | Some(StageMode::Trailers));
        if !is_sent {
            queue.add(data);
        } else if !data.is_empty() || (end && trailers.is_none()) {
            queue.has_sent = true;
            let end_of_stream = end && trailers.is_none();
            let body = HttpBody { body: data.to_vec(), end_of_stream, ..HttpBody::default() };
            self.send(side, body_message(side, body));
            if self.observer.is_some() {
                self.sides[side as usize].add(data);
            } else if mode == Some(StageMode::Chunks) {
                self.push_awaited(side, Awaited::Chunk(data), true);
            }
        }
        if !end {
            return;
        }
        let queue = &mut self.sides[side as usize];
        match trailers {
            Some(trailers) if mode.is_some() && queue.sends_trailers => {
                queue.has_sent = true;
                let headers = fields(&self.config, &trailers);
                let fields = HttpTrailers { trailers: Some(HeaderMap { headers }) };
                self.send(side, trailers_message(side, fields));
                if self.observer.is_some() {
                    return self.push_awaited(side, Awaited::End(Some(trailers)), false);
                }
                self.push_awaited(side, Awaited::Trailers(trailers), mode != Some(StageMode::Duplex));
            }
            // The processor ends the result itself.
            None if mode == Some(StageMode::Duplex) => {}
            trailers => self.push_awaited(side, Awaited::End(trailers), false),
        }
    }

    /// Returns the next part of the result of a side's body.
    pub(super) fn poll_next(&mut self, cx: &mut Context<'_>, side: Side) -> Poll<Result<BodyPart, Stopped>> {
        self.poll_progress(cx, side)?;
        let queue = &mut self.sides[side as usize];
        if self.end.is_some() {
            queue.release();
        }
        match queue.take_ready() {
            Some(piece) => Poll::Ready(Ok(piece)),
            None => Poll::Pending,
        }
    }

    /// Sends and receives what is possible for the result of a side. A complete result no longer depends on the call.
    pub(super) fn poll_progress(&mut self, cx: &mut Context<'_>, side: Side) -> Result<(), Stopped> {
        if self.sides[side as usize].is_finished() {
            return Ok(());
        }
        self.poll(cx, side);
        match self.end {
            Some(CallEnd::Continue) | None => Ok(()),
            Some(_) => Err(Stopped),
        }
    }

    /// Ends the call after a failure.
    pub(crate) fn fail(&mut self, failure: ProcessorFailure) {
        let is_lost = self.sides.iter().any(SideQueue::has_lost_content);
        if matches!(failure, ProcessorFailure::Call(_)) {
            self.call = CallState::Closed;
        }
        self.close();
        let own = self.by_route.as_ref().and_then(|by_route| by_route.failure_allowed);
        let is_allowed = own.unwrap_or(self.config.failure_allowed) && !is_lost || self.observer.is_some();
        let on_error = self.config.status_on_error;
        let (status, details, cause) = match failure {
            ProcessorFailure::Ended if !is_lost => {
                self.end = Some(CallEnd::Continue);
                return;
            }
            ProcessorFailure::Ended => (on_error, "ext_proc_error_stream_closed".to_owned(), Box::default()),
            ProcessorFailure::Late => {
                self.stats.ext_proc_timeouts.inc();
                (504, "ext_proc_error_per-message_timeout_exceeded".to_owned(), Box::default())
            }
            ProcessorFailure::Call(CallFailure { status, message }) => {
                self.stats.ext_proc_failed.inc();
                (on_error, format!("ext_proc_error_gRPC_error_{status}"), message)
            }
            ProcessorFailure::Spurious => {
                self.stats.ext_proc_spurious.inc();
                (on_error, "ext_proc_error_spurious_message".to_owned(), Box::default())
            }
            ProcessorFailure::Invalid(reason) => {
                (on_error, format!("ext_proc_error_{reason}"), Box::default())
            }
        };
        let (prefix, cluster) = (&self.stat_prefix, &self.config.service.cluster);
        limit_log::log(Limit::Processor, format_args!("{prefix}, cluster {cluster}: {details} {cause}"));
        self.end = Some(if is_allowed {
            self.stats.ext_proc_allowed.inc();
            CallEnd::Continue
        } else {
            CallEnd::Failed(status, details)
        });
    }

    fn close(&mut self) {
        if let CallState::Open(_) = std::mem::replace(&mut self.call, CallState::Closed) {
            self.stats.ext_proc_closed.inc();
        }
        self.frames.clear();
        self.queued = 0;
    }

    fn push_awaited(&mut self, side: Side, awaited: Awaited, is_timed: bool) {
        let queue = &mut self.sides[side as usize];
        if is_timed && queue.deadline.is_none() {
            queue.deadline = Some(Instant::now() + self.config.timeout);
        }
        queue.push_awaited(awaited);
    }

    fn send(&mut self, side: Side, message: Message) {
        let queue = &mut self.sides[side as usize];
        let attributes = queue.attributes.take();
        let message = ProcessingRequest {
            request: Some(message),
            metadata_context: Some(queue.metadata.clone()),
            attributes: attributes.map(|found| (EXT_PROC.to_owned(), found)).into_iter().collect(),
            protocol_config: self.protocol.take(),
            observability_mode: self.observer.is_some(),
            ..ProcessingRequest::default()
        };
        let frame = call::grpc_frame(&message.to_vec());
        self.stats.ext_proc_sent.inc();
        self.queued += frame.len();
        self.frames.push_back(frame);
        if let Some(task) = self.observer.as_mut().and_then(|observer| observer.task.take()) {
            task.wake();
        }
    }

    /// Sends and receives what is possible. `side` is the one that the task polls for.
    fn poll(&mut self, cx: &mut Context<'_>, side: Side) {
        if let Some(observer) = &mut self.observer {
            observer.waiting = Some(cx.waker().clone());
            return;
        }
        if self.end.is_some() {
            return;
        }
        if let Err(failure) = self.poll_call(cx, side) {
            self.fail(failure);
        }
        if self.end.is_some() {
            // The task may have polled the other side already.
            cx.waker().wake_by_ref();
        }
    }

    fn poll_call(&mut self, cx: &mut Context<'_>, side: Side) -> Result<(), ProcessorFailure> {
        // A stage for both directions takes content only once the call is open.
        let is_awaited = self.sides.iter().any(|side| side.mode == Some(StageMode::Duplex));
        if matches!(self.call, CallState::Idle) && (is_awaited || !self.frames.is_empty()) {
            let open = open(self.worker.clone(), self.config.clone(), self.by_route.clone());
            self.call = CallState::Opening(Box::pin(open));
        }
        if let CallState::Opening(opening) = &mut self.call
            && let Poll::Ready(opened) = opening.as_mut().poll(cx)
        {
            let unavailable = |error: Error| {
                let message = error.to_string().into();
                ProcessorFailure::Call(CallFailure { status: call::UNAVAILABLE, message })
            };
            self.call = CallState::Open(Box::new(opened.map_err(unavailable)?));
            self.stats.ext_proc_started.inc();
        }
        let mut is_paused = false;
        if matches!(self.call, CallState::Open(_)) {
            let unsent = self.poll_frames(cx);
            is_paused = self.poll_answers(cx, side, unsent.as_ref())?;
        }
        if self.end.is_some() {
            return Ok(());
        }
        // The processor is not responsible for a slow receiver, so its time begins again after the pause.
        if is_paused || self.is_paused {
            let deadline = Instant::now() + self.config.timeout;
            let deadlines = self.sides.iter_mut().filter_map(|side| side.deadline.as_mut());
            deadlines.for_each(|of| *of = deadline.max(*of));
        }
        self.is_paused = is_paused;
        let next = self.sides.iter().map(|side| side.deadline).fold(None, earlier);
        match self.timer.poll(cx, next.filter(|_| !is_paused)) {
            Poll::Ready(()) => Err(ProcessorFailure::Late),
            Poll::Pending => Ok(()),
        }
    }

    /// Sends messages as far as the processor's window allows. Returns the error after which none can be sent.
    fn poll_frames(&mut self, cx: &mut Context<'_>) -> Option<Error> {
        let CallState::Open(call) = &mut self.call else { return None };
        while let Some(frame) = self.frames.front() {
            match call.poll_send(cx, &frame[self.sent..]) {
                Poll::Pending => break,
                Poll::Ready(Ok(count)) => self.sent += count,
                Poll::Ready(Err(error)) => {
                    self.frames.clear();
                    (self.sent, self.queued) = (0, 0);
                    return Some(error);
                }
            }
            if self.sent == frame.len() {
                self.queued -= self.sent;
                self.sent = 0;
                self.frames.pop_front();
            }
        }
        None
    }

    /// Reads answers. Returns whether it stops because a receiver is slow.
    fn poll_answers(
        &mut self,
        cx: &mut Context<'_>,
        side: Side,
        unsent: Option<&Error>,
    ) -> Result<bool, ProcessorFailure> {
        for _ in 0..ANSWERS_PER_POLL {
            if self.sides.iter().any(|side| side.ready_bytes() >= MAX_READY) {
                return Ok(true);
            }
            // The end of the call may follow an answer. The task takes the answer first.
            if self.sides.iter().any(|side| side.answer.is_some()) {
                return Ok(false);
            }
            let CallState::Open(call) = &mut self.call else { return Ok(false) };
            let message = match call.poll_receive(cx, MAX_ANSWER) {
                Poll::Pending => return Ok(false),
                Poll::Ready(Ok(Some(message))) => message,
                Poll::Ready(Ok(None)) => return Err(ProcessorFailure::Ended),
                // A server that has ended the call says why in its trailers.
                Poll::Ready(Err(mut failure)) => {
                    if let Some(error) = unsent.filter(|_| failure.message.is_empty()) {
                        failure.message = error.to_string().into();
                    }
                    return Err(ProcessorFailure::Call(failure));
                }
            };
            if self.observer.is_some() {
                continue;
            }
            let message = ProcessingResponse::from_slice(&message).map_err(|error| {
                let message = error.to_string().into();
                ProcessorFailure::Call(CallFailure { status: call::INTERNAL, message })
            })?;
            let other = self.receive(message)?.is_some_and(|found| found != side);
            if self.end.is_some() {
                return Ok(false);
            }
            if other {
                // The task may have polled the other side already.
                cx.waker().wake_by_ref();
            }
        }
        cx.waker().wake_by_ref();
        Ok(false)
    }
}

impl Drop for ProcessorSession {
    fn drop(&mut self) {
        if let CallState::Open(call) = std::mem::replace(&mut self.call, CallState::Closed)
            && self.frames.is_empty()
        {
            self.stats.ext_proc_closed.inc();
            call.abandon();
        }
    }
}

async fn open(
    worker: Rc<Worker>,
    config: Arc<ExternalProcessing>,
    by_route: Option<Arc<ProcessingOverride>>,
) -> Result<CallStream, Error> {
    let own = by_route.as_ref().and_then(|by_route| by_route.service.as_ref());
    let service = own.unwrap_or(&config.service);
    let mut head = call::grpc_head(PROCESS, &service.authority);
    let more = by_route.iter().flat_map(|by_route| &by_route.metadata);
    for (name, value) in service.metadata.iter().chain(more) {
        head.set(name, value.as_bytes());
    }
    let snapshot = worker.snapshot();
    CallStream::open(&worker, &snapshot, &service.cluster, &head).await
}
