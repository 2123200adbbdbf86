//! What the site shows of results of any study: the history of all figures, and the main figure.

use crate::{report::Spread, scenario::format::Figure};

/// Median and range of a figure of a result, in the unit of tables.
pub(in crate::scenario) struct FigureHistory {
    /// Topology, or section of cases.
    pub(in crate::scenario) section: String,
    /// Peer and number of connections, or case.
    pub(in crate::scenario) series: String,
    /// CSS class of the peer.
    pub(in crate::scenario) colour: String,
    pub(in crate::scenario) figure: &'static Figure,
    pub(in crate::scenario) spread: Spread,
    /// The trend has a line of it. The table has all figures.
    pub(in crate::scenario) is_drawn: bool,
}

/// The figure of a result that answers its question best.
pub(in crate::scenario) struct MainFigure {
    /// Topology and number of connections, or section of cases.
    pub(in crate::scenario) place: String,
    pub(in crate::scenario) figure: &'static Figure,
    /// Median and range of Skysail and of its peers, in the unit of tables.
    pub(in crate::scenario) measured: Vec<(String, Spread)>,
    /// Values of others, with their numbers in the list of sources.
    pub(in crate::scenario) published: Vec<(String, f64)>,
}
