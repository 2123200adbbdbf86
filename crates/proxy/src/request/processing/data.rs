//! Metadata and attributes in messages to a processor, and the metadata that it sets.

use serde_json::Value;
use skysail_xds::envoy::pb::{envoy::config::core::v3::Metadata, google::protobuf::Struct};

use crate::{
    request::{
        authorization::json,
        context::{RequestContext, add_metadata},
        processor::{Processor, Side},
    },
    telemetry::{self, structure},
};
use skysail_policy::{config::processing::Attributes, record::Context};

impl<'a> RequestContext<'a> {
    /// Sets the metadata of the next messages of a side and, if `with_attributes`, the attributes of the next one.
    pub(super) fn set_data(&mut self, processor: &Processor<'a>, side: Side, with_attributes: bool) {
        let attributes = if with_attributes { self.attributes(processor, side) } else { None };
        let metadata = self.metadata_context(processor);
        processor.session.borrow_mut().set_data(side, metadata, attributes);
    }

    /// Stores the metadata that processors have set while bodies were forwarded, for the record.
    #[cold]
    pub(crate) fn finish_processing(&mut self) {
        let Some(filters) = &mut self.decision.response_filters else { return };
        for processor in std::mem::take(&mut filters.processors) {
            self.take_stage_metadata(&processor);
        }
    }

    /// Stores the metadata that a processor has set while bodies were forwarded.
    pub(crate) fn take_stage_metadata(&mut self, processor: &Processor<'a>) {
        // The filters of the request have run: none of them has seen the metadata of the request's body.
        for found in processor.session.borrow_mut().take_metadata() {
            self.take_metadata(processor, found, false);
        }
    }

    /// Returns the metadata that the processor gets.
    fn metadata_context(&self, processor: &Processor<'a>) -> Metadata {
        let own = processor.by_route.and_then(|by_route| by_route.forwarded.as_ref());
        let names = own.unwrap_or(&processor.config.data.forwarded);
        let found = self.outcome.metadata.as_deref();
        let entries = names.iter().filter_map(|name| {
            let Value::Object(object) = found?.get(&**name)? else { return None };
            Some((name.to_string(), structure(object)))
        });
        Metadata { filter_metadata: entries.collect(), ..Metadata::default() }
    }

    /// Stores the metadata of an answer, as far as the processor may set them. `is_recorded` says that later filters of
    /// the request see them, so that revalidation needs them.
    pub(super) fn take_metadata(&mut self, processor: &Processor<'a>, found: Struct, is_recorded: bool) {
        let own = processor.by_route.and_then(|by_route| by_route.received.as_ref());
        let names = own.unwrap_or(&processor.config.data.received);
        for (namespace, value) in json(found) {
            if let Value::Object(object) = value
                && names.iter().any(|name| **name == *namespace)
            {
                if is_recorded {
                    self.decision.filter_results.add_metadata(&namespace, &object);
                }
                add_metadata(&mut self.outcome, &namespace, object);
            }
        }
    }

    /// Returns the attributes for the first message of a side; `None` if the processor gets none.
    fn attributes(&self, processor: &Processor<'a>, side: Side) -> Option<Struct> {
        let data = &processor.config.data;
        let own = processor.by_route.and_then(|by_route| match side {
            Side::Request => by_route.request_attributes.as_ref(),
            Side::Response => by_route.response_attributes.as_ref(),
        });
        let list: &Attributes = own.unwrap_or(match side {
            Side::Request => &data.request_attributes,
            Side::Response => &data.response_attributes,
        });
        if list.is_empty() {
            return None;
        }
        let record = self.record();
        let context = Context {
            record: &record,
            request: Some(self.exchange.request),
            response: (side == Side::Response).then_some(&*self.exchange.response),
        };
        let found = list.iter().filter_map(|(name, expression)| {
            Some((name.to_string(), telemetry::attribute_json(expression, &context)?))
        });
        Some(structure(&found.collect()))
    }
}
