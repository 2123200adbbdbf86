//! Answers of a processor.

use std::time::{Duration, Instant};

use prost::Message as _;
use skysail_xds::envoy::pb::{
    envoy::service::ext_proc::v3::{
        BodyResponse, ProcessingResponse, TrailersResponse, body_mutation::Mutation,
        processing_response::Response as Answer,
    },
    google::protobuf::{Duration as DurationProto, Struct, Value, value::Kind},
};

use super::{
    super::{
        ProcessorFailure, Side,
        changes::{Head, apply, content},
        queue::{Awaited, StageMode},
    },
    CallEnd, ProcessorSession,
};

/// Maximum size in bytes of the metadata that the processor has set while bodies are forwarded.
const MAX_METADATA: usize = 64 << 10;

const METADATA_TOO_LARGE: ProcessorFailure = ProcessorFailure::Invalid("metadata_too_large");

impl ProcessorSession {
    /// Processes an answer. Returns its side; `None` for an immediate response or an extension of the deadline.
    pub(super) fn receive(
        &mut self,
        mut response: ProcessingResponse,
    ) -> Result<Option<Side>, ProcessorFailure> {
        let Some(answer) = response.response.take() else {
            let Some(time) = &response.override_message_timeout else {
                return Err(ProcessorFailure::Invalid("no_answer"));
            };
            self.extend(time);
            return Ok(None);
        };
        let side = match &answer {
            Answer::RequestHeaders(_) | Answer::RequestBody(_) | Answer::RequestTrailers(_) => Side::Request,
            Answer::ResponseHeaders(_) | Answer::ResponseBody(_) | Answer::ResponseTrailers(_) => {
                Side::Response
            }
            Answer::ImmediateResponse(_) => {
                self.stats.ext_proc_received.inc();
                self.keep_metadata(Side::Request, response.dynamic_metadata)?;
                self.answer_request(answer)?;
                return Ok(None);
            }
            Answer::StreamedImmediateResponse(_) => {
                return Err(ProcessorFailure::Invalid("unsupported_streamed_immediate_response"));
            }
        };
        if matches!(self.sides[side as usize].awaited.front(), Some(Awaited::Answer(is_answer)) if is_answer(&answer))
        {
            let queue = &mut self.sides[side as usize];
            queue.take_due();
            queue.answer = Some(ProcessingResponse { response: Some(answer), ..response });
        } else {
            self.receive_for_stage(side, answer)?;
            self.keep_metadata(side, response.dynamic_metadata)?;
        }
        self.stats.ext_proc_received.inc();
        let queue = &mut self.sides[side as usize];
        let has_deadline = queue.is_due() && queue.mode != Some(StageMode::Duplex);
        queue.deadline = has_deadline.then(|| Instant::now() + self.config.timeout);
        queue.is_extended = false;
        Ok(Some(side))
    }

    /// Processes an answer about a body that is forwarded.
    fn receive_for_stage(&mut self, side: Side, answer: Answer) -> Result<(), ProcessorFailure> {
        let queue = &mut self.sides[side as usize];
        match answer {
            Answer::RequestBody(body) | Answer::ResponseBody(body) => match mutation(body) {
                Some(Mutation::StreamedResponse(chunk)) => queue.add_streamed(chunk)?,
                mutation => {
                    if !matches!(queue.awaited.front(), Some(Awaited::Chunk(_))) {
                        return Err(ProcessorFailure::Spurious);
                    }
                    let new = mutation.map(|mutation| content(Some(mutation))).transpose()?;
                    if let Some(Awaited::Chunk(data)) = queue.take_due() {
                        queue.add(new.map_or(data, Into::into));
                    }
                    queue.settle();
                }
            },
            Answer::RequestTrailers(answer) | Answer::ResponseTrailers(answer) => {
                if !matches!(queue.awaited.front(), Some(Awaited::Trailers(_))) {
                    return Err(ProcessorFailure::Spurious);
                }
                if let Some(Awaited::Trailers(mut trailers)) = queue.take_due() {
                    let TrailersResponse { header_mutation } = answer;
                    if let Some(mutation) = header_mutation {
                        let head = &mut Head::Trailers(&mut trailers);
                        let rejected = apply(&self.config.rules, &mutation, head)?;
                        self.stats.ext_proc_rejected.add(rejected);
                    }
                    queue.finish(Some(trailers));
                }
            }
            _ => return Err(ProcessorFailure::Spurious),
        }
        Ok(())
    }

    fn answer_request(&mut self, answer: Answer) -> Result<(), ProcessorFailure> {
        if !self.config.allow_immediate {
            return Err(ProcessorFailure::Invalid("immediate_response_disabled"));
        }
        if let Answer::ImmediateResponse(answer) = answer {
            self.close();
            self.end = Some(CallEnd::Answered(Box::new(answer)));
        }
        Ok(())
    }

    /// Keeps metadata for the request's task. A later value replaces an earlier one of the same name.
    fn keep_metadata(&mut self, side: Side, found: Option<Struct>) -> Result<(), ProcessorFailure> {
        let Some(found) = found else { return Ok(()) };
        if found.encoded_len() > MAX_METADATA {
            return Err(METADATA_TOO_LARGE);
        }
        let size = |name: &String, value: &Value| name.len() + value.encoded_len();
        for (filter, value) in found.fields {
            let Some(Kind::StructValue(found)) = value.kind else { continue };
            let known = self.metadata[side as usize].fields.entry(filter).or_insert_with_key(|filter| {
                self.metadata_size += filter.len();
                Value { kind: Some(Kind::StructValue(Struct::default())) }
            });
            let Some(Kind::StructValue(known)) = &mut known.kind else { continue };
            for (name, value) in found.fields {
                self.metadata_size += size(&name, &value);
                let before = known.fields.insert(name.clone(), value);
                self.metadata_size -= before.map_or(0, |before| size(&name, &before));
            }
        }
        if self.metadata_size > MAX_METADATA {
            self.take_metadata();
            return Err(METADATA_TOO_LARGE);
        }
        Ok(())
    }

    /// Extends the deadline of the answer that is due. As in Envoy, an invalid or second extension is ignored.
    fn extend(&mut self, time: &DurationProto) {
        let parts = u64::try_from(time.seconds).ok().zip(u32::try_from(time.nanos).ok());
        let time = parts.map_or(Duration::ZERO, |(seconds, nanos)| {
            Duration::from_secs(seconds).saturating_add(Duration::from_nanos(nanos.into()))
        });
        let is_valid = (Duration::from_millis(1)..=self.config.max_timeout).contains(&time);
        let due = self.sides.iter_mut().find(|side| side.deadline.is_some() && !side.is_extended);
        match due.filter(|_| is_valid) {
            Some(due) => {
                (due.deadline, due.is_extended) = (Some(Instant::now() + time), true);
                self.stats.ext_proc_extended.inc();
            }
            None => self.stats.ext_proc_not_extended.inc(),
        }
    }
}

/// Returns the change of a chunk, if there is one.
fn mutation(body: BodyResponse) -> Option<Mutation> {
    body.response?.body_mutation?.mutation
}
