//! An external processor and its work on one request: one call for the request and its response.
//!
//! `session` is the call: what has been sent, which answers are due, and how the call ends. `stage` passes the content
//! of bodies through it. `changes` has headers in messages, and the processor's changes of them.

pub(crate) mod changes;
mod messages;
mod observer;
mod queue;
mod session;
mod stage;

use std::{rc::Rc, sync::Arc};

use skysail_xds::envoy::pb::envoy::service::ext_proc::v3::processing_request::Request as Message;

use crate::{call::CallFailure, telemetry::stats::ManagerStats, worker::Worker};
use skysail_policy::config::{
    HttpManager,
    http::Filter,
    processing::{ExternalProcessing, ProcessingMode, ProcessingOverride},
};

pub(crate) use queue::StageMode;
pub(crate) use session::{CallEnd, SharedSession, Stopped};
pub(crate) use stage::SessionStage;

/// Direction of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Request,
    Response,
}

/// A processor and the state of its work on a request.
pub(crate) struct Processor<'a> {
    pub(crate) filter: &'a Filter,
    pub(crate) config: &'a Arc<ExternalProcessing>,
    pub(crate) by_route: Option<&'a Arc<ProcessingOverride>>,
    /// Parts of the exchange that it gets.
    pub(crate) mode: ProcessingMode,
    /// The call.
    pub(crate) session: SharedSession,
}

/// Reason why the processor's work on a request ends early.
#[derive(Debug)]
pub(crate) enum ProcessorFailure {
    /// The processor has ended the stream without an error. The request continues, unless content would be missing.
    Ended,
    /// The call failed.
    Call(CallFailure),
    /// The answer did not arrive in time.
    Late,
    /// The answer is not one to a message that was sent.
    Spurious,
    /// The answer violates the rules.
    Invalid(&'static str),
}

impl<'a> Processor<'a> {
    pub(crate) fn new(
        worker: &Rc<Worker>,
        manager: &HttpManager,
        filter: &'a Filter,
        config: &'a Arc<ExternalProcessing>,
        by_route: Option<&'a Arc<ProcessingOverride>>,
    ) -> Self {
        let mode = by_route.and_then(|by_route| by_route.mode).unwrap_or(config.mode);
        let session = session::ProcessorSession::new(worker, manager, config, by_route, mode);
        let session = Rc::new(session.into());
        if let Some(close_timeout) = config.observes {
            tokio::task::spawn_local(observer::run(Rc::clone(&session), close_timeout));
        }
        Self { filter, config, by_route, mode, session }
    }

    /// Returns whether the processor gets nothing more.
    pub(crate) fn is_done(&self) -> bool {
        self.session.borrow().is_ended()
    }

    /// Ends the processor's work after a failure.
    pub(crate) fn fail(&self, failure: ProcessorFailure) -> Stopped {
        self.session.borrow_mut().fail(failure);
        Stopped
    }

    /// Returns the stage for a body.
    pub(crate) fn stage(&self, side: Side) -> SessionStage {
        SessionStage::new(self.session.clone(), side)
    }

    /// Sends a message to a processor that only observes.
    pub(crate) fn tell(&self, side: Side, message: Message) {
        self.session.borrow_mut().tell(side, message);
    }

    /// Returns the counters of the connection manager.
    pub(crate) fn stats(&self) -> Rc<ManagerStats> {
        self.session.borrow().stats()
    }
}

impl Drop for Processor<'_> {
    fn drop(&mut self) {
        self.session.borrow_mut().finish_observing();
    }
}
