//! The shape of addresses and routes on systems that have no back end yet.

use super::{Error, RouteConfig};
use crate::tun::Tun;
use crate::{Paths, Unsupported};

/// Never exists: [`Routes::apply`] fails here.
#[derive(Debug)]
pub struct Routes(std::convert::Infallible);

impl Routes {
    pub async fn apply(_tun: &Tun, _config: &RouteConfig, _paths: &Paths) -> Result<Self, Error> {
        Err(Unsupported("setting addresses and routes").into())
    }

    pub async fn repair(&mut self) -> Result<(), Error> {
        match self.0 {}
    }

    pub async fn check(&mut self) -> Result<bool, Error> {
        match self.0 {}
    }

    pub fn has_rule(&self) -> bool {
        match self.0 {}
    }

    pub async fn undo(self) -> Result<(), Error> {
        match self.0 {}
    }
}

/// Never exists.
#[derive(Debug)]
pub struct Watch(std::convert::Infallible);

impl Watch {
    pub fn new() -> Result<Self, Error> {
        Err(Unsupported("watching routes").into())
    }

    pub(crate) fn networks() -> Result<Self, Error> {
        Self::new()
    }

    pub async fn changed(&self) {
        match self.0 {}
    }

    pub fn clear(&self) {
        match self.0 {}
    }
}

pub(crate) fn remove_leftovers(_paths: &Paths) -> Result<u32, Error> {
    Ok(0)
}
