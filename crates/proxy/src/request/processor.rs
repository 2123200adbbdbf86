//! The call of an external processor for one request: one stream for its request and its response.

use std::{rc::Rc, time::Duration};

use skysail_proto::Codec as _;
use skysail_xds::envoy::pb::envoy::{
    extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode,
    service::ext_proc::v3::{ProcessingRequest, ProcessingResponse, ProtocolConfiguration},
};

use crate::{
    call::{self, CallFailure, CallStream},
    worker::Worker,
};
use skysail_http::timer;
use skysail_policy::config::{
    Snapshot,
    http::Filter,
    processing::{BodyMode, ExternalProcessing, ProcessingMode, ProcessingOverride},
};

/// Path of the gRPC method.
const PROCESS: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";

/// Maximum size of an answer in bytes: a body of maximum size, and as many bytes of headers.
const MAX_ANSWER: usize = 2 << 20;

/// Maximum number of times that an answer may extend its timeout.
const MAX_EXTENSIONS: u32 = 1;

/// A processor and the state of its work on a request.
pub(crate) struct Processor<'a> {
    pub(crate) filter: &'a Filter,
    pub(crate) config: &'a ExternalProcessing,
    pub(crate) by_route: Option<&'a ProcessingOverride>,
    /// Parts of the exchange that it gets.
    pub(crate) mode: ProcessingMode,
    /// The processor gets nothing more.
    pub(crate) is_done: bool,
    /// The stream, after the first message.
    stream: Option<CallStream>,
}

/// Reason why the processor's work on a request ends early.
#[derive(Debug)]
pub(crate) enum ProcessorFailure {
    /// The processor has ended the stream without an error. The request continues.
    Ended,
    /// The call failed.
    Call(CallFailure),
    /// The answer did not arrive in time.
    Late,
    /// The answer is not one to the message that was sent, or violates the rules.
    Invalid(&'static str),
}

impl<'a> Processor<'a> {
    pub(crate) fn new(
        filter: &'a Filter,
        config: &'a ExternalProcessing,
        by_route: Option<&'a ProcessingOverride>,
    ) -> Self {
        let mode = by_route.and_then(|by_route| by_route.mode).unwrap_or(config.mode);
        Self { filter, config, by_route, mode, is_done: false, stream: None }
    }

    /// Returns whether a failure of the processor lets the request continue.
    pub(crate) fn is_failure_allowed(&self) -> bool {
        self.by_route.and_then(|by_route| by_route.failure_allowed).unwrap_or(self.config.failure_allowed)
    }

    /// Sends a message and returns the answer to it.
    ///
    /// # Errors
    /// There is no answer. The processor gets nothing more.
    pub(crate) async fn ask(
        &mut self,
        worker: &Rc<Worker>,
        snapshot: &Snapshot,
        mut message: ProcessingRequest,
    ) -> Result<ProcessingResponse, ProcessorFailure> {
        let stream = self.stream.take();
        if stream.is_none() {
            message.protocol_config = Some(self.protocol());
        }
        let frame = call::grpc_frame(&message.to_vec());
        let exchange = self.exchange(worker, snapshot, stream, &frame);
        match timer::timeout(self.config.timeout, Box::pin(exchange)).await {
            Some(Ok((stream, Some(answer)))) => self.extended(stream, answer).await,
            Some(Ok((_, None))) => Err(ProcessorFailure::Ended),
            Some(Err(failure)) => Err(ProcessorFailure::Call(failure)),
            None => Err(ProcessorFailure::Late),
        }
    }

    /// Waits again while answers only ask for more time.
    async fn extended(
        &mut self,
        mut stream: CallStream,
        mut answer: ProcessingResponse,
    ) -> Result<ProcessingResponse, ProcessorFailure> {
        let mut extensions = 0;
        loop {
            let asked = answer.override_message_timeout.as_ref().filter(|_| answer.response.is_none());
            let Some(asked) = asked else {
                self.stream = Some(stream);
                return Ok(answer);
            };
            let asked = u64::try_from(asked.seconds).ok().zip(u32::try_from(asked.nanos).ok());
            let asked = asked.map_or(Duration::ZERO, |(seconds, nanos)| {
                Duration::from_secs(seconds).saturating_add(Duration::from_nanos(nanos.into()))
            });
            // As in Envoy, an invalid or second request for more time is ignored.
            let is_valid = (Duration::from_millis(1)..=self.config.max_timeout).contains(&asked)
                && extensions < MAX_EXTENSIONS;
            extensions += 1;
            let limit = if is_valid { asked } else { self.config.timeout };
            if extensions > MAX_EXTENSIONS + 1 {
                return Err(ProcessorFailure::Invalid("too_many_timeouts"));
            }
            answer = match timer::timeout(limit, Box::pin(stream.receive(MAX_ANSWER))).await {
                Some(Ok(Some(message))) => decode(&message).map_err(ProcessorFailure::Call)?,
                Some(Ok(None)) => return Err(ProcessorFailure::Ended),
                Some(Err(failure)) => return Err(ProcessorFailure::Call(failure)),
                None => return Err(ProcessorFailure::Late),
            };
        }
    }

    /// Sends a framed message, on a new stream if there is none, and receives the next one.
    async fn exchange(
        &self,
        worker: &Rc<Worker>,
        snapshot: &Snapshot,
        stream: Option<CallStream>,
        frame: &[u8],
    ) -> Result<(CallStream, Option<ProcessingResponse>), CallFailure> {
        let lost = |error: skysail_policy::error::Error| CallFailure {
            status: call::UNAVAILABLE,
            message: error.to_string().into(),
        };
        let mut stream = match stream {
            Some(stream) => stream,
            None => self.open(worker, snapshot).await.map_err(lost)?,
        };
        // A server that has ended the call says why in its trailers.
        let sent = stream.send(frame).await;
        match stream.receive(MAX_ANSWER).await {
            Ok(Some(message)) => Ok((stream, Some(decode(&message)?))),
            Ok(None) => Ok((stream, None)),
            Err(failure) => match sent {
                Err(error) if failure.message.is_empty() => {
                    Err(CallFailure { message: error.to_string().into(), ..failure })
                }
                _ => Err(failure),
            },
        }
    }

    async fn open(
        &self,
        worker: &Rc<Worker>,
        snapshot: &Snapshot,
    ) -> Result<CallStream, skysail_policy::error::Error> {
        let own = self.by_route.and_then(|by_route| by_route.service.as_ref());
        let service = own.unwrap_or(&self.config.service);
        let mut head = call::grpc_head(PROCESS, &service.authority);
        let more = self.by_route.iter().flat_map(|by_route| &by_route.metadata);
        for (name, value) in service.metadata.iter().chain(more) {
            head.set(name, value.as_bytes());
        }
        CallStream::open(worker, snapshot, &service.cluster, &head).await
    }

    /// Returns the description of the bodies, for the first message.
    fn protocol(&self) -> ProtocolConfiguration {
        let mode = |mode| match mode {
            BodyMode::None => BodySendMode::None,
            BodyMode::Buffered => BodySendMode::Buffered,
            BodyMode::BufferedPartial => BodySendMode::BufferedPartial,
        };
        ProtocolConfiguration {
            request_body_mode: mode(self.mode.request_body).into(),
            response_body_mode: mode(self.mode.response_body).into(),
            ..ProtocolConfiguration::default()
        }
    }
}

impl Drop for Processor<'_> {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            stream.abandon();
        }
    }
}

fn decode(message: &[u8]) -> Result<ProcessingResponse, CallFailure> {
    ProcessingResponse::from_slice(message)
        .map_err(|error| CallFailure { status: call::INTERNAL, message: error.to_string().into() })
}
