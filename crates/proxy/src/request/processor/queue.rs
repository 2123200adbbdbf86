//! One side of a processor's call: the answers that are due, and the content that is ready to be forwarded.

use std::{collections::VecDeque, time::Instant};

use bytes::Bytes;

use super::ProcessorFailure;
use skysail_http::{head::Headers, stage::BodyPart};
use skysail_xds::envoy::pb::{
    envoy::{
        config::core::v3::Metadata,
        service::ext_proc::v3::{ProcessingResponse, StreamedBodyResponse, processing_response::Response},
    },
    google::protobuf::Struct,
};

/// What a processor gets of a body that is forwarded at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StageMode {
    /// Only the trailers.
    Trailers,
    /// The content in chunks; it answers each of them.
    Chunks,
    /// The content in chunks; it returns other content in chunks of its own.
    Duplex,
}

/// An answer that is due, in the order of the messages.
pub(super) enum Awaited {
    /// One that the request's task waits for, if the function accepts it.
    Answer(fn(&Response) -> bool),
    /// One to this chunk of the body.
    Chunk(Bytes),
    /// One to these trailers.
    Trailers(Headers),
    /// None: the end of the body, which follows the answers before it.
    End(Option<Headers>),
}

/// One side of a call.
#[derive(Default)]
pub(super) struct SideQueue {
    pub(super) awaited: VecDeque<Awaited>,
    /// The answer for the request's task.
    pub(super) answer: Option<ProcessingResponse>,
    /// Deadline of the next answer.
    pub(super) deadline: Option<Instant>,
    /// The processor has extended the deadline.
    pub(super) is_extended: bool,
    /// Content to be forwarded.
    ready: VecDeque<BodyPart>,
    /// Number of content bytes in `ready`.
    ready_bytes: usize,
    /// Number of content bytes whose answers are due.
    awaited_bytes: usize,
    /// What the processor gets of the body.
    pub(super) mode: Option<StageMode>,
    /// The processor gets the trailers.
    pub(super) sends_trailers: bool,
    /// A part of the body has been sent to the processor.
    pub(super) has_sent: bool,
    /// The end of the body has been sent to the processor.
    pub(super) is_source_ended: bool,
    /// The end of the result is known.
    is_finished: bool,
    /// Metadata in messages of this side.
    pub(super) metadata: Metadata,
    /// Attributes for the next message.
    pub(super) attributes: Option<Struct>,
}

impl SideQueue {
    /// Returns the number of content bytes that are held.
    pub(super) fn held(&self) -> usize {
        self.ready_bytes + self.awaited_bytes
    }

    /// Returns the number of content bytes that wait for the receiver.
    pub(super) fn ready_bytes(&self) -> usize {
        self.ready_bytes
    }

    /// Returns whether the end of the result is known.
    pub(super) fn is_finished(&self) -> bool {
        self.is_finished
    }

    /// Returns whether content that only the processor has is missing in the result.
    pub(super) fn has_lost_content(&self) -> bool {
        self.mode == Some(StageMode::Duplex) && self.has_sent && !self.is_finished
    }

    /// Adds an answer that is due.
    pub(super) fn push_awaited(&mut self, awaited: Awaited) {
        if let Awaited::Chunk(data) = &awaited {
            self.awaited_bytes += data.len();
        }
        self.awaited.push_back(awaited);
        self.settle();
    }

    /// Returns whether an answer is due.
    pub(super) fn is_due(&self) -> bool {
        !self.awaited.is_empty()
    }

    /// Removes the answer that is due next.
    pub(super) fn take_due(&mut self) -> Option<Awaited> {
        let due = self.awaited.pop_front();
        if let Some(Awaited::Chunk(data)) = &due {
            self.awaited_bytes -= data.len();
        }
        due
    }

    /// Adds content to the result.
    pub(super) fn add(&mut self, data: Bytes) {
        if !data.is_empty() {
            self.ready_bytes += data.len();
            self.ready.push_back(BodyPart { data, ..BodyPart::default() });
        }
    }

    /// Ends the result.
    pub(super) fn finish(&mut self, trailers: Option<Headers>) {
        self.is_finished = true;
        match self.ready.back_mut() {
            Some(last) => (last.end, last.trailers) = (true, trailers),
            None => self.ready.push_back(BodyPart { end: true, trailers, ..BodyPart::default() }),
        }
    }

    /// Adds a chunk of a result that does not correspond to the chunks that were sent.
    ///
    /// # Errors
    /// The body is not sent in both directions, the processor has got no content yet or owes the answer about the
    /// headers, or the result ends before the body or has ended.
    pub(super) fn add_streamed(&mut self, chunk: StreamedBodyResponse) -> Result<(), ProcessorFailure> {
        let awaits_headers = matches!(self.awaited.front(), Some(Awaited::Answer(_)));
        let is_duplex = self.mode == Some(StageMode::Duplex) && self.has_sent;
        // An end before the end of the body would leave unread content in front of the next request.
        let is_early = chunk.end_of_stream && (!self.is_source_ended || self.is_due());
        if !is_duplex || awaits_headers || self.is_finished || is_early {
            return Err(ProcessorFailure::Spurious);
        }
        self.add(chunk.body.into());
        if chunk.end_of_stream {
            self.finish(None);
        }
        Ok(())
    }

    /// Forwards the end of the body once the answers before it have arrived.
    pub(super) fn settle(&mut self) {
        if matches!(self.awaited.front(), Some(Awaited::End(_)))
            && let Some(Awaited::End(trailers)) = self.take_due()
        {
            self.finish(trailers);
        }
    }

    /// Forwards everything that waits for an answer as it is.
    pub(super) fn release(&mut self) {
        self.deadline = None;
        while let Some(due) = self.take_due() {
            match due {
                Awaited::Answer(_) => {}
                Awaited::Chunk(data) => self.add(data),
                Awaited::Trailers(trailers) => self.finish(Some(trailers)),
                Awaited::End(trailers) => self.finish(trailers),
            }
        }
    }

    /// Takes the next part of the result.
    pub(super) fn take_ready(&mut self) -> Option<BodyPart> {
        let piece = self.ready.pop_front()?;
        self.ready_bytes -= piece.data.len();
        Some(piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(body: &str, end_of_stream: bool) -> StreamedBodyResponse {
        StreamedBodyResponse { body: body.into(), end_of_stream, ..StreamedBodyResponse::default() }
    }

    #[test]
    fn the_end_follows_the_answers_before_it() {
        let mut queue = SideQueue { mode: Some(StageMode::Chunks), ..SideQueue::default() };
        queue.push_awaited(Awaited::Chunk("abc".into()));
        queue.push_awaited(Awaited::End(None));
        assert!(queue.take_ready().is_none() && queue.held() == 3);
        queue.take_due();
        queue.add("d".into());
        queue.settle();
        let last = queue.take_ready().unwrap();
        assert!(last.end && last.data == "d" && queue.held() == 0);
    }

    #[test]
    fn content_that_waits_is_released_in_order() {
        let mut queue = SideQueue { mode: Some(StageMode::Chunks), ..SideQueue::default() };
        for data in ["a", "b"] {
            queue.push_awaited(Awaited::Chunk(data.into()));
        }
        queue.push_awaited(Awaited::Trailers(Headers::default()));
        queue.release();
        assert_eq!(queue.take_ready().unwrap().data, "a");
        let last = queue.take_ready().unwrap();
        assert!(last.end && last.data == "b" && last.trailers.is_some());
    }

    #[test]
    fn a_result_cannot_precede_or_outlast_the_body() {
        let mut queue = SideQueue { mode: Some(StageMode::Duplex), ..SideQueue::default() };
        // Before any content, and before the answer about the headers.
        queue.add_streamed(chunk("a", false)).unwrap_err();
        queue.has_sent = true;
        queue.push_awaited(Awaited::Answer(|_| true));
        queue.add_streamed(chunk("a", false)).unwrap_err();
        queue.take_due();
        queue.add_streamed(chunk("a", false)).unwrap();
        assert!(queue.has_lost_content());
        // Before the end of the body.
        queue.add_streamed(chunk("b", true)).unwrap_err();
        queue.is_source_ended = true;
        queue.add_streamed(chunk("b", true)).unwrap();
        assert!(!queue.has_lost_content());
        queue.add_streamed(chunk("c", false)).unwrap_err();
        queue.add_streamed(chunk("", true)).unwrap_err();
    }

    #[test]
    fn only_bodies_in_both_directions_have_streamed_results() {
        let mut queue = SideQueue { mode: Some(StageMode::Chunks), has_sent: true, ..SideQueue::default() };
        queue.add_streamed(chunk("a", false)).unwrap_err();
    }
}
