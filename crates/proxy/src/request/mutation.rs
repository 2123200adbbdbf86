//! Mutations of the headers of requests and responses, and the buffering of a request's body.

use std::time::SystemTime;

use crate::request::{
    context::{Filtered, RequestContext},
    response_body::MAX_BODY,
    transfer::collect,
};
use skysail_http::{
    decompress::Decompressor,
    grpc_web::Conversion,
    head::{RequestHead, ResponseHead},
    http1::Framing,
};
use skysail_policy::{
    config::{
        HttpManager,
        http::{Filter, FilterKind},
        listener::Direction,
        mutation::{HeaderMutation, HeaderMutations},
        route::Setting,
    },
    error::{Error, Kind},
    mutation,
    record::Record,
};

impl<'a> RequestContext<'a> {
    /// Applies the mutations of a filter and of the route to the request.
    pub(crate) fn mutate_request(
        &mut self,
        filter: &'a Filter,
        config: &'a HeaderMutation,
        setting: Option<&'a Setting>,
    ) {
        let mut lists = lists(config, setting).filter(|list| list.changes_request()).peekable();
        if lists.peek().is_none() {
            return;
        }
        self.decision.filter_results.begin(filter, setting);
        self.decision.filter_results.keep_head(self.exchange.request);
        let mut head = std::mem::take(self.exchange.request);
        for list in lists {
            mutation::apply_request(list, &mut head, &self.record());
        }
        *self.exchange.request = head;
    }

    /// Applies the mutations of all filters to the response, and adds the fields of filters. As in Envoy, the last
    /// filter comes first.
    #[cold]
    pub(crate) fn mutate_response(&mut self) {
        let fields = std::mem::take(&mut self.decision.response_filters_mut().fields);
        let mut end = fields.len();
        let route = self.decision.found.ok().map(|found| found.route);
        for filter in self.scope.manager.filters.iter().rev() {
            let FilterKind::HeaderMutation(config) = &filter.kind else { continue };
            let setting = route.and_then(|route| route.setting(&filter.name));
            if matches!(setting, Some(Setting::Off)) || (filter.disabled && setting.is_none()) {
                continue;
            }
            let mut response = std::mem::take(self.exchange.response);
            // Filters that a local reply skipped come after all filters that added fields.
            let mut before = self.decision.response_filters.iter().flat_map(|state| &state.fields_before);
            let before = before.find(|(other, _)| std::ptr::eq(*other, filter)).map_or(end, |known| known.1);
            fields[before.min(end)..end].iter().for_each(|field| field.add_to(&mut response));
            end = before.min(end);
            let mut record = self.record();
            record.status = response.status();
            record.grpc_status = self.grpc_status(&response);
            for list in lists(config, setting).filter(|list| !list.response.is_empty()) {
                mutation::apply_response(list, &mut response, self.exchange.request, &record);
            }
            *self.exchange.response = response;
        }
        fields[..end].iter().for_each(|field| field.add_to(self.exchange.response));
    }

    /// Advertises a coding, and decompresses the body of a request that has it. Content that filters have read already
    /// is decompressed at once.
    ///
    /// # Errors
    /// The content is not valid in its coding, or too large.
    pub(crate) async fn decompress_request(
        &mut self,
        decompressor: &Decompressor,
        is_coded: bool,
    ) -> Result<Filtered, Error> {
        let exchange = &mut self.exchange;
        self.decision.filter_results.keep_head(exchange.request);
        if decompressor.advertise {
            let name = decompressor.coding.name();
            let known = exchange.request.header("accept-encoding");
            let all = known.map(|known| [known, name.as_bytes()].join(&b','));
            exchange.request.set("accept-encoding", all.as_deref().unwrap_or(name.as_bytes()));
        }
        let begun = is_coded.then(|| decompressor.begin(decompressor.request, exchange.request));
        let Some(mut decoding) = begun.flatten() else { return Ok(Filtered::Continue) };
        if exchange.body.bytes == 0 && !exchange.body.is_collected() {
            exchange.body.convert(Conversion::Decompress(Box::new(decoding)));
            return Ok(Filtered::Continue);
        }
        collect(self.scope.manager, exchange, MAX_BODY).await?;
        let kept = exchange.body.kept().filter(|_| exchange.body.is_collected());
        let kept = kept.ok_or_else(|| Error::new(Kind::BodyTooLarge))?;
        let content = decoding.piece(kept, true).map_err(|_| Error::new(Kind::DownstreamProtocol))?;
        let trailers = exchange.body.trailers().cloned();
        exchange.body.replace(content.into(), Framing::Chunked, trailers);
        Ok(Filtered::Continue)
    }

    /// Begins to decompress the response, if it has a coding of the decompressors.
    #[cold]
    pub(crate) fn begin_decoding(&mut self) {
        let Some(state) = &mut self.decision.response_filters else { return };
        let response = &mut *self.exchange.response;
        let mut begun = state.decompressors.iter().filter_map(|one| one.begin(one.response, response));
        state.decoding = begun.next().map(Box::new);
    }

    /// Waits for the whole body of the request, which then has a known length.
    ///
    /// # Errors
    /// The body is larger than `max_bytes` bytes, or does not arrive.
    pub(crate) async fn buffer_body(&mut self, max_bytes: usize) -> Result<Filtered, Error> {
        let exchange = &mut self.exchange;
        self.decision.filter_results.keep_head(exchange.request);
        collect(self.scope.manager, exchange, max_bytes).await?;
        let length = exchange.body.kept().map(<[u8]>::len).filter(|length| *length <= max_bytes);
        let Some(length) = length.filter(|_| exchange.body.is_collected()) else {
            return Err(Error::new(Kind::BodyTooLarge));
        };
        if !exchange.request.has("content-length") {
            exchange.request.set_number("content-length", length as u64);
        }
        exchange.body.set_known_length();
        Ok(Filtered::Continue)
    }
}

/// Applies the mutations of all filters to the response to a request whose head was refused. It has no route.
#[cold]
pub(crate) fn mutate_refusal(manager: &HttpManager, response: &mut ResponseHead) {
    let mut record = Record::new(Direction::Unspecified, SystemTime::now());
    record.status = response.status();
    for filter in manager.filters.iter().rev().filter(|filter| !filter.disabled) {
        if let FilterKind::HeaderMutation(config) = &filter.kind {
            mutation::apply_response(&config.mutations, response, &RequestHead::default(), &record);
        }
    }
}

/// Returns the mutations of a filter, then those of the route's levels in their order.
pub(crate) fn lists<'a>(
    config: &'a HeaderMutation,
    setting: Option<&'a Setting>,
) -> impl Iterator<Item = &'a HeaderMutations> {
    let by_route = match setting {
        Some(Setting::HeaderMutation(lists)) => &lists[..],
        _ => &[],
    };
    let count = by_route.len();
    let ordered = (0..count).filter_map(move |index| {
        let index = if config.most_specific_wins { index } else { count - 1 - index };
        by_route.get(index).map(|list| &**list)
    });
    std::iter::once(&config.mutations).chain(ordered)
}
