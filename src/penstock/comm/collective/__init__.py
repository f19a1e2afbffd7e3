"""Operations in which several ranks take part."""
