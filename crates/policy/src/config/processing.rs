//! External processing: a service sees requests and responses, and changes or answers them.
//!
//! Source: `envoy.extensions.filters.http.ext_proc.v3`.

use std::time::Duration;

use super::text::TextMatch;
use crate::expression::Expression;

/// An external processor and what it gets.
#[derive(Debug)]
pub struct ExternalProcessing {
    /// Fingerprint of the filter's encoded configuration.
    pub fingerprint: u64,
    /// The service.
    pub service: ProcessorService,
    /// A request continues without processing after a failure of the processor.
    pub failure_allowed: bool,
    /// Status of the response after a failure of the processor, if `failure_allowed` is false.
    pub status_on_error: u16,
    /// Timeout of each answer.
    pub timeout: Duration,
    /// Maximum timeout that the processor may request; with zero, such requests are ignored.
    pub max_timeout: Duration,
    /// Parts of the exchange that the processor gets.
    pub mode: ProcessingMode,
    /// The processor may change the mode.
    pub allow_override: bool,
    /// Modes that it may choose, if not empty.
    pub allowed_modes: Vec<ProcessingMode>,
    /// Headers that the processor may change.
    pub rules: MutationRules,
    /// Headers that the processor gets; `None` for all.
    pub allowed_headers: Option<Vec<TextMatch>>,
    /// Headers that the processor does not get.
    pub disallowed_headers: Vec<TextMatch>,
    /// Attributes and metadata.
    pub data: ProcessorData,
    /// Selection of the route after the processor has changed the request's headers.
    pub route: RouteReselection,
    /// The processor may answer requests itself.
    pub allow_immediate: bool,
    /// Set if nothing waits for the processor and its answers are ignored (`observability_mode`): the maximum time from
    /// the end of the request to the end of the call (`deferred_close_timeout`).
    pub observes: Option<Duration>,
}

/// A route's settings for external processing; `None` keeps those of the filter.
#[derive(Clone, Debug, Default)]
pub struct ProcessingOverride {
    /// Fingerprint of the encoded settings.
    pub fingerprint: u64,
    /// The service.
    pub service: Option<ProcessorService>,
    /// Further headers of the call.
    pub metadata: Vec<(Box<str>, Box<str>)>,
    /// Parts of the exchange that the processor gets.
    pub mode: Option<ProcessingMode>,
    /// See [`ExternalProcessing::failure_allowed`].
    pub failure_allowed: Option<bool>,
    /// Attributes with request messages.
    pub request_attributes: Option<Attributes>,
    /// Attributes with response messages.
    pub response_attributes: Option<Attributes>,
    /// Namespaces of metadata that the processor gets.
    pub forwarded: Option<Vec<Box<str>>>,
    /// Namespaces of metadata that the processor may set.
    pub received: Option<Vec<Box<str>>>,
}

impl ProcessingOverride {
    /// Returns these settings, with those of a less specific level where they are unset.
    #[must_use]
    pub fn over(&self, less: &Self) -> Self {
        Self {
            fingerprint: self.fingerprint ^ less.fingerprint.rotate_left(1),
            service: self.service.clone().or_else(|| less.service.clone()),
            metadata: if self.metadata.is_empty() { less.metadata.clone() } else { self.metadata.clone() },
            mode: self.mode.or(less.mode),
            failure_allowed: self.failure_allowed.or(less.failure_allowed),
            request_attributes: self.request_attributes.clone().or_else(|| less.request_attributes.clone()),
            response_attributes: self
                .response_attributes
                .clone()
                .or_else(|| less.response_attributes.clone()),
            forwarded: self.forwarded.clone().or_else(|| less.forwarded.clone()),
            received: self.received.clone().or_else(|| less.received.clone()),
        }
    }
}

/// A gRPC service of a processor.
#[derive(Clone, Debug)]
pub struct ProcessorService {
    /// Cluster of the service.
    pub cluster: Box<str>,
    /// `:authority` of the call.
    pub authority: Box<str>,
    /// Headers of the call.
    pub metadata: Vec<(Box<str>, Box<str>)>,
}

/// Attributes by name.
pub type Attributes = std::sync::Arc<Vec<(Box<str>, Expression)>>;

/// Attributes and metadata of a processor.
#[derive(Debug)]
pub struct ProcessorData {
    /// Attributes with the first request message.
    pub request_attributes: Attributes,
    /// Attributes with the first response message.
    pub response_attributes: Attributes,
    /// Namespaces of dynamic metadata that the processor gets.
    pub forwarded: Vec<Box<str>>,
    /// Namespaces of dynamic metadata that the processor may set.
    pub received: Vec<Box<str>>,
}

/// Parts of the exchange that a processor gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessingMode {
    /// Headers of the request.
    pub request_headers: bool,
    /// Headers of the response.
    pub response_headers: bool,
    /// Body of the request.
    pub request_body: BodyMode,
    /// Body of the response.
    pub response_body: BodyMode,
    /// Trailers of the request.
    pub request_trailers: bool,
    /// Trailers of the response.
    pub response_trailers: bool,
}

impl Default for ProcessingMode {
    fn default() -> Self {
        Self {
            request_headers: true,
            response_headers: true,
            request_body: BodyMode::None,
            response_body: BodyMode::None,
            request_trailers: false,
            response_trailers: false,
        }
    }
}

/// Form in which a processor gets a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyMode {
    /// It does not get the body.
    None,
    /// It gets the whole body. A larger one than the limit is refused.
    Buffered,
    /// It gets the body up to the limit. The rest of a larger body is forwarded without processing.
    BufferedPartial,
    /// It gets the body in chunks, and answers each of them.
    Streamed,
    /// It gets the body in chunks, and returns another body in chunks of its own.
    FullDuplex,
}

impl BodyMode {
    /// Returns whether the processor gets the body while it is forwarded.
    pub fn is_streamed(self) -> bool {
        matches!(self, Self::Streamed | Self::FullDuplex)
    }
}

/// Selection of the route after a processor has changed the request's headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteReselection {
    /// If the processor requests it.
    OnRequest,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// Headers that a processor may change. Source: `envoy.config.common.mutation_rules.v3.HeaderMutationRules`.
#[derive(Debug, Default)]
pub struct MutationRules {
    /// `host`, `:authority`, `:scheme` and `:method` may be changed.
    pub allow_routing: bool,
    /// Headers that begin with `x-envoy` may be changed.
    pub allow_envoy: bool,
    /// Pseudo-headers must not be changed.
    pub disallow_system: bool,
    /// No header may be changed.
    pub disallow_all: bool,
    /// Headers that may be changed despite the rules above.
    pub allowed: Option<regex::bytes::Regex>,
    /// Headers that must not be changed.
    pub disallowed: Option<regex::bytes::Regex>,
    /// A change that is not allowed is an error; otherwise it is ignored.
    pub disallowed_is_error: bool,
}

impl MutationRules {
    /// Returns whether a header may be removed.
    pub fn may_remove(&self, name: &str) -> bool {
        !name.starts_with(':') && name != "host" && self.may_change(name)
    }

    /// Returns whether a header may be set.
    pub fn may_change(&self, name: &str) -> bool {
        let matches = |regex: &Option<regex::bytes::Regex>| {
            regex.as_ref().is_some_and(|regex| regex.is_match(name.as_bytes()))
        };
        if matches(&self.disallowed) {
            return false;
        }
        if matches(&self.allowed) {
            return true;
        }
        let is_routing = matches!(name, "host" | ":authority" | ":scheme" | ":method");
        !(self.disallow_all
            || (self.disallow_system && name.starts_with(':'))
            || (is_routing && !self.allow_routing)
            || (name.starts_with("x-envoy") && !self.allow_envoy))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_allow_or_refuse_changes_of_headers() {
        let rules = MutationRules::default();
        assert!(rules.may_change("x-a") && rules.may_change(":path") && rules.may_change(":status"));
        for name in ["host", ":authority", ":scheme", ":method", "x-envoy-a"] {
            assert!(!rules.may_change(name), "{name}");
        }
        assert!(!rules.may_remove(":path") && !rules.may_remove("host") && rules.may_remove("x-a"));
        let open = MutationRules { allow_routing: true, allow_envoy: true, ..MutationRules::default() };
        assert!(open.may_change(":method") && open.may_change("x-envoy-a") && !open.may_remove("host"));
        let closed = MutationRules { disallow_system: true, ..MutationRules::default() };
        assert!(!closed.may_change(":path") && closed.may_change("x-a"));
        let regex = |text: &str| Some(regex::bytes::Regex::new(text).unwrap());
        let some = MutationRules {
            disallow_all: true,
            allowed: regex("^x-.*$"),
            disallowed: regex("^x-b$"),
            ..MutationRules::default()
        };
        assert!(some.may_change("x-a") && !some.may_change("x-b") && !some.may_change("y"));
    }
}
