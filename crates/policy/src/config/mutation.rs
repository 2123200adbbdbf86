//! Mutations of headers and query parameters.
//!
//! Source: `envoy.extensions.filters.http.header_mutation.v3`.

use super::{
    http::Format,
    route::{AppendAction, HeaderOp},
    text::TextMatch,
};

/// The filter.
#[derive(Debug)]
pub struct HeaderMutation {
    /// Mutations for all routes. They come before those of the routes.
    pub mutations: HeaderMutations,
    /// Of the mutations of a route, its virtual host and its table, those of the route come last; otherwise first.
    pub most_specific_wins: bool,
}

/// Mutations of a request and its response, each list in order.
#[derive(Debug)]
pub struct HeaderMutations {
    /// Fingerprint of the encoded configuration.
    pub fingerprint: u64,
    /// Mutations of the request's headers.
    pub request: Vec<Mutation>,
    /// Mutations of the query, after those of the headers.
    pub query: Vec<QueryMutation>,
    /// Mutations of the response's headers.
    pub response: Vec<Mutation>,
}

/// A mutation of headers.
#[derive(Debug)]
pub enum Mutation {
    /// Adds or removes a header.
    Op(HeaderOp),
    /// Removes all headers whose name in lower case matches.
    RemoveMatching(TextMatch),
}

/// A mutation of query parameters.
#[derive(Debug)]
pub enum QueryMutation {
    /// Removes all parameters of this name.
    Remove(Box<str>),
    /// Adds a parameter.
    Add {
        /// Name.
        key: Box<str>,
        /// Value. It is percent-encoded.
        value: Format,
        /// Treatment of existing parameters of this name.
        action: AppendAction,
    },
}

impl HeaderMutations {
    /// Returns whether requests are changed.
    pub fn changes_request(&self) -> bool {
        !(self.request.is_empty() && self.query.is_empty())
    }
}
