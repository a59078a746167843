"""The words of the synthetic shop: departments, genres, makers and places. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Genre:
    """One kind of thing on sale.

    Attributes:
        name: category.
        phrase: what one item is.
        companion: the genre that people come to from this one.
        firsts: first words of a title.
        seconds: second words of a title.
        makers: two for each price tier: budget, middle, premium.
    """

    name: str
    phrase: str
    companion: str
    firsts: tuple[str, ...]
    seconds: tuple[str, ...]
    makers: tuple[str, ...]


@dataclass(frozen=True)
class Department:
    """A part of the shop.

    Attributes:
        name: category above the genres.
        thing: prefix of item ids.
        title: how a name becomes a title.
        volume: how a title becomes that of a volume.
        prices: typical price in each tier.
        genres: what is sold there.
    """

    name: str
    thing: str
    title: str
    volume: str
    prices: tuple[float, float, float]
    genres: tuple[Genre, ...]


# fmt: off
DEPARTMENTS = (
    Department(
        "Books", "book", title="The {}", volume="{}, Vol. {}", prices=(6.0, 12.0, 26.0),
        genres=(
            Genre(
                "Mystery", "mystery novel", companion="Puzzles",
                firsts=(
                    "Lighthouse", "Harbour", "Orchard", "Midnight", "Vicarage", "Canal", "Winter",
                    "Clockmaker", "Ferry", "Abbey", "Foxglove", "Railway",
                ),
                seconds=(
                    "Murders", "Inheritance", "Affair", "Alibi", "Letters", "Witness",
                    "Disappearance", "Confession", "Verdict", "Secret",
                ),
                makers=(
                    "Penny Lane Press", "Corner Crime", "Blackwell & Finch", "Harbour House",
                    "Inspector's Library", "Gaslight Editions",
                ),
            ),
            Genre(
                "Science Fiction", "science fiction novel", companion="Electronics",
                firsts=(
                    "Orbital", "Quantum", "Martian", "Silent", "Fractured", "Distant", "Hollow",
                    "Solar", "Synthetic", "Last", "Drifting", "Binary",
                ),
                seconds=(
                    "Colony", "Horizon", "Protocol", "Signal", "Armada", "Archive", "Exodus",
                    "Paradox", "Station", "Machine",
                ),
                makers=(
                    "Rocket Paperbacks", "Starlane", "Event Horizon Books", "Nova & Sons",
                    "Perihelion", "Deep Field Editions",
                ),
            ),
            Genre(
                "Fantasy", "fantasy novel", companion="Co-operative Games",
                firsts=(
                    "Dragon", "Raven", "Ember", "Silver", "Thorn", "Forgotten", "Crystal", "Storm",
                    "Shadow", "Oaken", "Wandering", "Frost",
                ),
                seconds=(
                    "Throne", "Crown", "Prophecy", "Chronicle", "Blade", "Kingdom", "Oath",
                    "Covenant", "Grimoire", "Sword",
                ),
                makers=(
                    "Hearthfire", "Griffin Pocket", "Tall Tower", "Moonwell", "Runestone Press",
                    "Gilded Page",
                ),
            ),
            Genre(
                "Cookery", "cookbook", companion="Gardening",
                firsts=(
                    "Tuscan", "Weeknight", "Lisbon", "Garden", "Sourdough", "Smoky", "Seaside",
                    "Kyoto", "Andalusian", "Cosy", "Spice", "Harvest",
                ),
                seconds=(
                    "Kitchen", "Table", "Cookbook", "Pantry", "Suppers", "Feast", "Bakery",
                    "Larder", "Oven", "Picnic",
                ),
                makers=(
                    "Thrifty Spoon", "Quick Plate", "Saffron House", "Copper Pan", "Michel & Rose",
                    "The Long Table",
                ),
            ),
            Genre(
                "History", "history book", companion="Strategy Games",
                firsts=(
                    "Roman", "Hanseatic", "Ottoman", "Victorian", "Viking", "Byzantine", "Silk",
                    "Maritime", "Medieval", "Iron", "Atlantic", "Colonial",
                ),
                seconds=(
                    "Empire", "Republic", "Century", "Merchants", "Frontier", "Dynasty", "Voyages",
                    "Revolt", "Trade", "Cities",
                ),
                makers=(
                    "Pocket Past", "Plain History", "Meridian", "Clio Books", "Archive & Quill",
                    "Grand Atlas",
                ),
            ),
        ),
    ),
    Department(
        "Games", "game", title="{}", volume="{}: Season {}", prices=(15.0, 32.0, 70.0),
        genres=(
            Genre(
                "Strategy Games", "strategy game", companion="Model Building",
                firsts=(
                    "Bronze", "River", "Highland", "Sultan", "Glacier", "Guild", "Desert", "Trade",
                    "Island", "Castle", "Copper", "Emperor",
                ),
                seconds=(
                    "Conquest", "Settlers", "Dominion", "Rivals", "Frontiers", "Campaign",
                    "Masters", "Empires", "Siege", "Alliance",
                ),
                makers=(
                    "Roll & Go", "Small Box Games", "Meeple Forge", "Hexagon House",
                    "Warlord Studio", "Grand Table",
                ),
            ),
            Genre(
                "Co-operative Games", "co-operative game", companion="Fantasy",
                firsts=(
                    "Sunken", "Arctic", "Haunted", "Jungle", "Runaway", "Buried", "Cursed",
                    "Volcano", "Rescue", "Lunar", "Outbreak", "Lost",
                ),
                seconds=(
                    "Expedition", "Escape", "Temple", "Mission", "Manor", "Laboratory", "Rescue",
                    "Treasure", "Survivors", "Voyage",
                ),
                makers=(
                    "Roll & Go", "Friday Night", "Together Games", "Lantern Works", "Deep Quest",
                    "Grand Table",
                ),
            ),
            Genre(
                "Puzzles", "puzzle", companion="Mystery",
                firsts=(
                    "Baker", "Logic", "Cipher", "Marble", "Hidden", "Crooked", "Secret", "Infinite",
                    "Wooden", "Paper", "Mosaic", "Mirror",
                ),
                seconds=(
                    "Labyrinth", "Riddles", "Cube", "Enigma", "Locks", "Jigsaw", "Maze", "Casebook",
                    "Paradox", "Knots",
                ),
                makers=(
                    "Rainy Day", "Brain Bits", "Clever Fox", "Enigma Works", "Ravel & Co",
                    "Master Cutters",
                ),
            ),
            Genre(
                "Party Games", "party game", companion="Cookery",
                firsts=(
                    "Wild", "Quick", "Noisy", "Giggling", "Secret", "Dancing", "Bluffing", "Speedy",
                    "Silly", "Sneaky", "Lucky", "Midnight",
                ),
                seconds=(
                    "Charades", "Doodles", "Impostors", "Trivia", "Bidders", "Whispers",
                    "Snapshots", "Pirates", "Llamas", "Judges",
                ),
                makers=(
                    "Rainy Day", "Party Parrot", "Friday Night", "Loud & Clear", "Confetti Lab",
                    "Golden Hour",
                ),
            ),
        ),
    ),
    Department(
        "Kits", "kit", title="{} Kit", volume="{}, Set {}", prices=(12.0, 38.0, 95.0),
        genres=(
            Genre(
                "Model Building", "model kit", companion="History",
                firsts=(
                    "Steam", "Spitfire", "Galleon", "Alpine", "Viaduct", "Tramway", "Clipper",
                    "Lunar", "Signal", "Biplane", "Harbour", "Express",
                ),
                seconds=(
                    "Locomotive", "Workshop", "Station", "Fleet", "Squadron", "Diorama", "Bridge",
                    "Lander", "Depot", "Engine",
                ),
                makers=(
                    "Glue & Go", "First Model", "Scale Works", "Brass Rail", "Museum Line",
                    "Fine Scale",
                ),
            ),
            Genre(
                "Electronics", "electronics kit", companion="Science Fiction",
                firsts=(
                    "Blinking", "Weather", "Tinker", "Walking", "Retro", "Sensor", "Pocket",
                    "Rolling", "Radio", "Synth", "Talking", "Laser",
                ),
                seconds=(
                    "Robot", "Circuit", "Station", "Rover", "Amplifier", "Clock", "Arcade",
                    "Controller", "Receiver", "Lab",
                ),
                makers=(
                    "Spark Box", "Bit by Bit", "Circuit Barn", "Volt & Daughter", "Oscilla",
                    "Precision Works",
                ),
            ),
            Genre(
                "Knitting & Sewing", "needlework kit", companion="Cookery",
                firsts=(
                    "Nordic", "Cable", "Merino", "Patchwork", "Lace", "Fair-Isle", "Indigo",
                    "Meadow", "Chunky", "Heirloom", "Linen", "Autumn",
                ),
                seconds=(
                    "Shawl", "Blanket", "Pullover", "Quilt", "Mittens", "Tote", "Cardigan",
                    "Sampler", "Socks", "Cushion",
                ),
                makers=(
                    "Happy Yarn", "Thimble", "Wool & Willow", "Stitch House", "Highland Mill",
                    "Silk Road Atelier",
                ),
            ),
            Genre(
                "Gardening", "gardening kit", companion="Knitting & Sewing",
                firsts=(
                    "Balcony", "Herb", "Bonsai", "Cottage", "Wildflower", "Tomato", "Succulent",
                    "Orchid", "Pond", "Shade", "Urban", "Rose",
                ),
                seconds=(
                    "Garden", "Planter", "Greenhouse", "Border", "Terrarium", "Nursery", "Meadow",
                    "Trellis", "Seedbox", "Conservatory",
                ),
                makers=(
                    "Green Thumb", "Sprout", "Potting Shed", "Acorn & Vine", "Kew Lane",
                    "Royal Borders",
                ),
            ),
        ),
    ),
)

# Appended to a name when a genre's own words have run out.
PLACES = (
    "Aberdeen", "Bergen", "Bruges", "Cadiz", "Cork", "Delft", "Dover", "Evora", "Florence",
    "Galway", "Ghent", "Granada", "Hobart", "Innsbruck", "Jaipur", "Kyoto", "Lisbon", "Lucca",
    "Malmo", "Nantes", "Oslo", "Porto", "Quebec", "Riga", "Siena", "Tallinn", "Turin", "Uppsala",
    "Verona", "Whitby", "York",
)
# fmt: on
