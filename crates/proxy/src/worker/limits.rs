//! Rate limits of one connection.

use std::{
    cell::{OnceCell, RefCell},
    rc::Rc,
    sync::Arc,
};

use skysail_policy::{config::limit::RateLimit, state::rate_limit::Buckets};

/// Maximum number of limits for which a connection keeps buckets; the oldest are dropped. Routes with limits of their
/// own need one each.
const MAX_LIMITS: usize = 64;

type Known = RefCell<Vec<(Arc<RateLimit>, Arc<Buckets>)>>;

/// The buckets of a connection, by limit. They are made when a request first needs them.
#[derive(Clone, Debug, Default)]
pub(crate) struct ConnectionLimits(OnceCell<Rc<Known>>);

impl ConnectionLimits {
    /// Returns the connection's buckets for a limit.
    pub(crate) fn buckets(&self, limit: &Arc<RateLimit>) -> Arc<Buckets> {
        let mut known = self.0.get_or_init(Rc::default).borrow_mut();
        if let Some((_, buckets)) = known.iter().find(|(other, _)| Arc::ptr_eq(other, limit)) {
            return Arc::clone(buckets);
        }
        if known.len() >= MAX_LIMITS {
            known.remove(0);
        }
        let buckets = limit.connection_buckets();
        known.push((Arc::clone(limit), Arc::clone(&buckets)));
        buckets
    }
}
